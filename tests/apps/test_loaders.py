"""Tests the loaders of both apps. The tf.data loader is the "twin" of the DALI loader."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from common import hparams
from common.args import MAX_SEED, SHUFFLES
from common.dali_ops import IMAGENET_STD
from common.data import parts
from common.data.loader import SYNTHETIC_BOXES
from common.data.open import open_coco, open_tfrecords
from tests.common.drawn_sets import write_coco
from tests.common.reading import assert_iterator_resumes, ids
from tests.common.reading import read as read_examples
from tests.refusal import refusal

LOADERS = ["dali_cpu", "tensorflow"]
TARGETS = {
    "efficientdet": ["num_positives", "boxes", "classes"]
    + [f"{kind}_targets_{level}" for level in range(3, 7) for kind in ("class", "box")],
    "yolov4": ["boxes", "classes", "num_boxes"],
}
EVALUATION_FACTS = ["image_ids", "image_sizes", "letterbox"]
WITHOUT_RANDOMNESS = {
    "efficientdet": "augmentation=none,flip_prob=0,assignment=max_iou",
    "yolov4": "jitter=0,flip_prob=0,hue=0,mosaic_prob=0,mixup_prob=0,cutmix_prob=0,multi_scale=1,"
    "saturation=1,exposure=1",
}
AUGMENTATIONS_OF_BOTH_LOADERS = {
    "efficientdet": ("augmentation=scale_jitter", "flip_prob=0.5"),
    "yolov4": ("jitter=0.3", "hue=36", "mosaic_prob=0.5"),
}
SHARED_AUGMENTATIONS = ("rotation=20.0", "auto_augment=rand", "cutout_prob=0.5")
DALI_AUGMENTATIONS = {
    "efficientdet": ("augmentation=min_iou_crop", "grid_mask_prob=0.5", "hue=60.0", *SHARED_AUGMENTATIONS),
    "yolov4": ("mixup_prob=0.5", "cutmix_prob=0.5", *SHARED_AUGMENTATIONS),
}
MORE_DALI_AUGMENTATIONS = {  # test_pipeline.py and test_fresh_mosaic.py test what they do
    "efficientdet": ("brightness=0.5", "contrast=0.5", "saturation=0.5"),
    "yolov4": ("mosaic_prob=0.5,mosaic_tiles=fresh",),
}
RANDOM_SIZES = {"efficientdet": (), "yolov4": ("multi_scale=1.4",)}
PIXEL_SCALE = {"efficientdet": IMAGENET_STD, "yolov4": 255}
RESIZING = {"efficientdet": "antialias=true", "yolov4": "letterbox=true"}


def augmentations_of(app, pipeline_type):
    more = DALI_AUGMENTATIONS[app.name] if pipeline_type == "dali_cpu" else ()
    return AUGMENTATIONS_OF_BOTH_LOADERS[app.name] + more


@pytest.fixture
def make(app):
    """Gives make(source, pipeline_type, ["flip_prob=0.5", ...], ...), a loader without other randomness."""

    def run(source, pipeline_type, changes, *, training=True, **options):
        config = app.package.config.get_config(app.model_name)
        for spec in (f"{WITHOUT_RANDOMNESS[app.name]},image_size=64x96", *changes):
            config = hparams.override(config, spec)
        options = {"batch_size": 2, "num_threads": 1, "name_images": training} | options
        return app.make_loader(pipeline_type, source=source, config=config, training=training, **options)

    return run


def read(loader, steps):
    return [(images.numpy(), targets) for images, targets in loader.dataset().take(steps)]


@pytest.fixture(scope="session")
def equal_images(tmp_path_factory):
    """16 copies of one picture with two boxes."""
    picture = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    boxes = [(0, (9, 9, 30, 30)), (0, (50, 20, 30, 35))]
    return write_coco(tmp_path_factory.mktemp("equal"), [(i, picture, boxes) for i in range(16)])


def test_twelve_images_in_batches_of_ten_give_one_training_step_or_two_evaluation_steps(make, source):
    for training, expected in ((True, 1), (False, 2)):
        loader = make(source, "dali_cpu", [], training=training, batch_size=2, num_shards=5)
        assert loader.steps_per_epoch == expected


@pytest.mark.parametrize("pipeline_type", LOADERS)
def test_order_of_training_images_depends_on_the_seed_and_not_on_augmentation_or_threads(
    app, make, source, pipeline_type
):
    def order(changes, **options):
        """Returns the image ids of both ranks for nine steps."""
        options |= {"num_shards": 2, "with_targets": False}
        loaders = [make(source, pipeline_type, changes, shard_id=rank, **options) for rank in (0, 1)]
        batches = zip(*(read(loader, 9) for loader in loaders), strict=True)
        return [
            sorted(
                itertools.chain(*(targets["image_ids"].numpy().reshape(-1).tolist() for _, targets in pair))
            )
            for pair in batches
        ]

    expected = order(augmentations_of(app, pipeline_type), seed=0)
    for epoch in (expected[:3], expected[3:6], expected[6:]):
        assert sorted(itertools.chain(*epoch)) == sorted(source.annotations.image_ids)
    assert order([], seed=0, num_threads=2) == expected
    assert order([], seed=1) != expected


def test_loader_reads_records_in_the_order_of_its_shuffle_option(make, drawn_records, monkeypatch):
    monkeypatch.setattr(parts, "RUN", 1)  # else each of the small files is one part
    records, orders = open_tfrecords(f"{drawn_records}-*.tfrecord"), []
    for shuffle in SHUFFLES:
        loader = make(records, "dali_cpu", [], shuffle=shuffle, seed=3, with_targets=False)
        batches = [targets["image_ids"].numpy().tolist() for _, targets in read(loader, 6)]
        orders.append(list(itertools.chain(*batches)))
        assert orders[-1] == ids(read_examples(records.read, 12, training=True, shuffle=shuffle, seed=3))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("pipeline_type", LOADERS)
def test_every_augmentation_changes_equal_images_differently_per_image_rank_and_seed(
    app, make, equal_images, pipeline_type
):
    def draw(*changes, **more):
        """Returns pixels and boxes of each image."""
        options = {"batch_size": 8, "num_shards": 2, "seed": 5} | more
        ((images, targets),) = read(make(equal_images, pipeline_type, changes, **options), 1)
        pairs = zip(images, targets["boxes"].numpy(), strict=True)
        return [image.tobytes() + boxes.tobytes() for image, boxes in pairs]

    assert len({*draw(), *draw(shard_id=1), *draw(seed=6)}) == 1
    for change in augmentations_of(app, pipeline_type):
        batch = draw(change)
        assert len(set(batch)) > 1, change
        assert batch not in (draw(change, shard_id=1), draw(change, seed=6)), change


# --- elements ---


@pytest.mark.parametrize(
    ("training", "with_targets"),
    [(True, True), (False, True), (False, False)],
    ids=["training", "evaluation", "without targets"],
)
def test_batches_of_all_loaders_have_the_same_names_shapes_and_types(
    app, make, source, training, with_targets
):
    names = ["images", *(TARGETS[app.name] if with_targets else []), *([] if training else EVALUATION_FACTS)]
    names += ["lost"] if with_targets else []
    specs = []
    for pipeline_type in (*LOADERS, "synthetic"):
        options = {"training": training, "with_targets": with_targets, "count_lost": with_targets}
        options |= {"batch_size": 5, "name_images": False}
        loader = make(source, pipeline_type, [], **options)
        assert loader.pipeline_type == pipeline_type and loader.saveable and loader.num_threads == 1
        assert list(loader.element_spec) == names
        data = loader.dataset()
        specs.append(data.element_spec)
        images, targets = next(iter(data))
        assert images.shape == (5, 64, 96, 3) and np.isfinite(images).all()
        for name, tensor in targets.items():
            assert loader.element_spec[name].is_compatible_with(tensor)
        if pipeline_type != "synthetic":
            assert (loader.size, loader.steps_per_epoch) == (12, 2 if training else 3)
    assert specs[0] == specs[1] == specs[2]


def test_synthetic_loader_repeats_one_batch_of_valid_boxes_without_a_source(make):
    loader = make(None, "synthetic", [], batch_size=3, num_classes=4, seed=1)
    assert loader.size == 1024
    (images, targets), second = loader.dataset().take(2)
    for a, b in zip(tf.nest.flatten((images, targets)), tf.nest.flatten(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(np.unique(images[:, 0, 0, 0])) == 3
    boxes, classes = targets["boxes"].numpy(), targets["classes"].numpy()
    real = classes >= 0
    assert (real.sum(1) == SYNTHETIC_BOXES).all() and set(classes[real]) == {0, 1, 2, 3}
    assert (boxes[real][:, 2:] > boxes[real][:, :2]).all() and (boxes[~real] == -1).all()
    assert boxes[real].min() >= 0 and boxes.max() <= 1
    count = targets.get("num_positives", targets.get("num_boxes")).numpy()
    assert (count > 0).all() if "num_positives" in targets else (count == SYNTHETIC_BOXES).all()


# --- seeds ---


@pytest.mark.parametrize("pipeline_type", LOADERS)
def test_restored_loader_iterator_continues_with_the_same_batches(app, make, source, tmp_path, pipeline_type):
    changes = augmentations_of(app, pipeline_type) + RANDOM_SIZES[app.name]
    threads = iter((1, 2))

    def iterate():
        return iter(make(source, pipeline_type, changes, seed=3, num_threads=next(threads)).dataset())

    assert_iterator_resumes(iterate, tmp_path, before=4, after=4)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 100_000  # no images


def test_seed_of_an_epoch_is_the_sum_of_seed_and_epoch_modulo_the_largest_seed(app):
    config = app.package.config.get_config(app.model_name)
    epoch_options = app.package.loaders.epoch_options
    seeds = [epoch_options(config, seed, epoch)["seed"] for seed, epoch in ((5, 3), (MAX_SEED, 2))]
    assert seeds == [8, 1]


# --- the tf.data twin ---


def evaluation_epoch(loader) -> dict[str, np.ndarray]:
    """Returns {name: array} of an evaluation epoch, ordered by image id."""
    batches = read(loader, loader.steps_per_epoch)
    joined = {name: np.concatenate([targets[name] for _, targets in batches]) for name in loader.target_spec}
    joined["images"] = np.concatenate([images for images, _ in batches])
    image_ids, first = np.unique(joined["image_ids"], return_index=True)
    assert len(image_ids) == loader.size
    return {name: values[first] for name, values in joined.items()}


def compare_twins(app, make, source, changes, batch_size) -> int:
    """Asserts that both loaders give equal elements. Returns the number of anchors whose targets differ."""
    options = {"training": False, "batch_size": batch_size, "count_lost": True}
    dali, twin = (evaluation_epoch(make(source, kind, [changes], **options)) for kind in LOADERS)
    levels = np.abs(twin.pop("images") - dali.pop("images")) * PIXEL_SCALE[app.name]
    assert levels.mean((1, 2, 3)).max() < 0.5
    for image, place in zip(levels, dali["letterbox"].astype(int), strict=True):
        top, left, height, width = place
        # The image's border is not compared, because DALI and TensorFlow resize it differently.
        assert image[top + 1 : top + height - 1, left + 1 : left + width - 1].max() < 1.5
    different = 0
    for name, values in dali.items():
        same, atol = np.ones(len(values), bool), 1e-6
        if "_targets_" in name:
            classes = f"class_targets_{name[-1]}"
            same, atol = twin[classes] == dali[classes], 2e-5
            different += np.count_nonzero(~same) if name == classes else 0
        a, b = (x.reshape(*same.shape, -1)[same] for x in (values, twin[name]))
        np.testing.assert_allclose(a, b, atol=atol, err_msg=name)
    return different


def test_tensorflow_loader_equals_dali_on_synthetic_images(app, make, source):
    for changes in (RESIZING[app.name], "antialias=false,max_instances=2,min_box_size=12"):
        assert compare_twins(app, make, source, changes, 5) == 0


def test_tensorflow_loader_equals_dali_on_photographs(app, make, coco128):
    source = open_coco(str(coco128 / "images"), str(coco128 / "instances.json"))
    nine_anchors = {"efficientdet": ",max_level=7,num_scales=3,aspect_ratios=1.0,2.0,0.5"}.get(app.name, "")
    changes = f"image_size=192x256,max_instances=20{nine_anchors}"
    assert compare_twins(app, make, source, changes, 16) <= 12  # of 1.2 million; two may fit equally


def test_augmentation_that_only_dali_has_is_refused_by_the_tensorflow_loader_for_training(app, make, source):
    for change in DALI_AUGMENTATIONS[app.name] + MORE_DALI_AUGMENTATIONS[app.name]:
        message = f"--pipeline_type=tensorflow cannot do {change.rpartition(',')[2]}: use dali_cpu"
        assert message in refusal(make, source, "tensorflow", [change])
        make(source, "tensorflow", [change], training=False)
