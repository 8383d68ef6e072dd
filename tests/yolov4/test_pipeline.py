"""Every stage is checked by issue a drawn rectangle again, or against NumPy, colorsys and the letterbox."""

import dataclasses
import io
import itertools
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn
from PIL import Image

from common import letterbox
from common.datacheck.datasets import open_source
from yolov4 import color, crops, pipeline
from yolov4.config import get_config
from yolov4.pipeline import FILL, YOLOv4Pipeline

INPUT = (128, 192)  # height, width: not square, so that a swapped axis shows
PLAIN = dataclasses.replace(
    get_config("yolov4"),
    image_size=INPUT,
    multi_scale=1.0,
    jitter=0.0,
    flip_prob=0.0,
    hue=0.0,
    saturation=1.0,
    exposure=1.0,
    mosaic_prob=0.0,
)
COLOR = {"hue": 36.0, "saturation": 1.5, "exposure": 1.5}
ALL = {"jitter": 0.3, "flip_prob": 0.5, **COLOR}
SIZES = [(300, 500), (420, 200), (97, 131), (400, 90), (128, 192), (60, 500)]  # of drawn images
# One for each class; the background is noise around a dark grey.
COLORS = [(230, 20, 30), (20, 200, 40), (30, 40, 220), (220, 210, 20), (210, 30, 210), (20, 200, 210)]


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory) -> pathlib.Path:
    """48 PNGs of six shapes, each with one flat rectangle in the colour of its class; ids with gaps."""
    random = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("rectangles")
    images, annotations = [], []
    for i in range(48):
        height, width = SIZES[i % len(SIZES)]
        w, h = random.integers(width // 4, width // 2), random.integers(height // 4, height // 2)
        x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
        image = random.integers(60, 90, (height, width, 3), np.uint8)
        label = i // 2 % len(COLORS)
        image[y : y + h, x : x + w] = COLORS[label]
        annotations.append((1000 + 7 * i, (x, y, w, h), label))
        images.append((1000 + 7 * i, image))
    return write_coco(directory, images, annotations)


def write_coco(directory, images, annotations, suffix=".png", crowds=()) -> pathlib.Path:
    """images [(id, uint8 array or encoded bytes)], annotations [(image id, ltwh px, class)] -> COCO files."""
    entries = []
    for image_id, image in images:
        name = f"{image_id}{suffix}"
        if isinstance(image, bytes):
            (directory / name).write_bytes(image)
            width, height = Image.open(directory / name).size
        else:
            Image.fromarray(image).save(directory / name)
            height, width = image.shape[:2]
        entries.append({"id": image_id, "file_name": name, "height": int(height), "width": int(width)})
    document = {
        "images": entries,
        "categories": [{"id": 3 + 7 * i, "name": f"thing {i}"} for i in range(len(COLORS))],
        "annotations": [
            {
                "id": i + 1,
                "image_id": image_id,
                "category_id": 3 + 7 * label,
                "bbox": [float(v) for v in ltwh],
                "area": float(ltwh[2] * ltwh[3]),
                "iscrowd": int(i in crowds),
            }
            for i, (image_id, ltwh, label) in enumerate(annotations)
        ],
    }
    (directory / "instances.json").write_text(json.dumps(document))
    return directory


def source_of(directory: pathlib.Path):
    return open_source(images=str(directory), annotations=str(directory / "instances.json"))


def make(directory, config=PLAIN, **options) -> YOLOv4Pipeline:
    options = {"batch_size": 8, "training": True, "num_threads": 1} | options
    return YOLOv4Pipeline(source=source_of(directory), config=config, **options)


def batches(loader: YOLOv4Pipeline, count: int) -> list[dict[str, np.ndarray]]:
    """Batches from the DALI pipeline itself, by name."""
    result = []
    for _ in range(count):
        outputs = loader.pipeline.run()
        result.append(
            {n: np.asarray(o.as_tensor()) for n, o in zip(loader.element_spec, outputs, strict=True)}
        )
    return result


def run_stage(define, samples: list[tuple[np.ndarray, ...]], seed=1) -> list[list[np.ndarray]]:
    """Runs a stage on a batch; `define` gets one node for each array of a sample. -> [output][sample]."""
    pipe = dali.Pipeline(batch_size=len(samples), num_threads=1, device_id=None, seed=seed, exec_dynamic=True)
    with pipe:
        columns = [list(column) for column in zip(*samples, strict=True)]
        nodes = [fn.external_source(source=itertools.repeat(c), batch=True) for c in columns]
        pipe.set_outputs(*define(*nodes))
    return [[np.array(sample) for sample in output] for output in pipe.run()]


def class_map(image: np.ndarray) -> np.ndarray:
    """(H, W): the class whose colour a pixel in [0, 1] is nearest to; -1 for background and padding."""
    colors = np.array([*COLORS, (75, 75, 75), (FILL,) * 3], np.float32)
    nearest = np.abs(image[:, :, np.newaxis] * 255 - colors).sum(-1).argmin(-1)
    return np.where(nearest < len(COLORS), nearest, -1)


def find_rectangle(mask: np.ndarray) -> np.ndarray | None:
    """ltrb in pixels."""
    ys, xs = np.nonzero(mask)
    return None if len(ys) == 0 else np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def to_px(boxes: np.ndarray, image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    return boxes * [width, height, width, height]


# --- the drawn rectangle is found again ---

AUGMENTATIONS = {
    "stretch": {},
    "letterbox": {"letterbox": True},
    "jitter": {"jitter": 0.3},
    "letterbox and jitter": {"letterbox": True, "jitter": 0.3},
    "large jitter": {"jitter": 0.49},
    "flip": {"flip_prob": 1.0},
    "letterbox, jitter and flip": {"letterbox": True, "jitter": 0.3, "flip_prob": 0.5},
    "multi-scale": {"multi_scale": 1.4},
    "multi-scale, letterbox, jitter and flip": {
        "multi_scale": 1.4,
        "letterbox": True,
        "jitter": 0.3,
        "flip_prob": 0.5,
    },
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_boxes_and_pixels_move_together(rectangles, name):
    config = dataclasses.replace(PLAIN, **AUGMENTATIONS[name], min_box_size=3.0)
    found, sizes = 0, set()
    for batch in batches(make(rectangles, config, batch_size=12), 6):
        sizes.add(batch["images"].shape[1:3])
        for image, boxes, classes in zip(batch["images"], batch["boxes"], batch["classes"], strict=True):
            classes_px = class_map(image)
            kept = classes >= 0
            if not kept.any():  # cropped away, or too small to keep
                visible = find_rectangle(classes_px >= 0)
                assert visible is None or min(visible[2:] - visible[:2]) <= 4
                continue
            assert kept.sum() == 1
            rectangle, box = find_rectangle(classes_px == classes[0]), to_px(boxes[0], image)
            if rectangle is None:
                assert min(box[2:] - box[:2]) <= 4  # blurred into the background
                continue
            np.testing.assert_allclose(rectangle, box, atol=1.0)
            found += 1
    assert found > 55
    expected = {config.bucket(u) for u in range(config.size_range[0], config.size_range[1] + 1)}
    assert sizes <= expected and (len(sizes) > 2 if config.multi_scale > 1 else sizes == {INPUT})


def test_letterboxed_training_image_is_the_centred_letterbox_surrounded_by_fill(rectangles):
    config = dataclasses.replace(PLAIN, letterbox=True, **COLOR)
    geometries = {letterbox.geometry(*size, INPUT, centered=True) for size in SIZES}
    seen = set()
    for image in batches(make(rectangles, config, batch_size=48), 1)[0]["images"]:
        is_padding = np.isclose(image, FILL / 255, atol=1e-6).all(-1)  # colour leaves the padding alone
        top, left, bottom, right = find_rectangle(~is_padding)[[1, 0, 3, 2]]
        place = (top, left, bottom - top, right - left)
        assert place in geometries
        assert not is_padding[top:bottom, left:right].all(0).any()
        seen.add(place)
    assert seen == geometries


@pytest.mark.parametrize("tiles", ["batch", "fresh"])
@pytest.mark.parametrize("letterboxed", [False, True])
def test_mosaics_show_their_boxes_and_no_others(rectangles, letterboxed, tiles):
    """Inside each box is the colour of its class; pixels of such a colour are inside boxes of that class."""
    config = dataclasses.replace(
        PLAIN,
        mosaic_prob=1.0,
        mosaic_tiles=tiles,
        jitter=0.3,
        flip_prob=0.5,
        letterbox=letterboxed,
        min_box_size=2.0,
    )
    inside = found = 0
    for batch in batches(make(rectangles, config, batch_size=16), 4):
        assert (batch["num_boxes"] > 1).sum() > 8
        for image, boxes, classes in zip(batch["images"], batch["boxes"], batch["classes"], strict=True):
            classes_px = class_map(image)
            explained = classes_px < 0
            for box, label in zip(to_px(boxes, image), classes, strict=True):
                if label < 0:
                    continue
                left, top, right, bottom = np.concatenate([np.ceil(box[:2]), np.floor(box[2:])]).astype(int)
                interior = classes_px[top + 1 : bottom - 1, left + 1 : right - 1]
                assert (interior == label).all()
                inside += interior.size > 0
                top, left = max(top - 2, 0), max(left - 2, 0)
                around = classes_px[top : bottom + 2, left : right + 2]
                # The edge of another rectangle or tile may be mixed into another class' colour.
                explained[top : bottom + 2, left : right + 2] |= (around == label) | (around >= 0)
                found += 1
            for label in np.unique(classes_px[~explained]):  # dropped: below the minimum
                ys, xs = np.nonzero((classes_px == label) & ~explained)
                widths = np.bincount(ys).max(), np.bincount(xs).max()
                assert min(widths) <= 3
    assert inside > 120 and inside > 0.9 * found


def test_mixup_and_cutmix_take_the_boxes_along(rectangles):
    for change in ({"mixup_prob": 1.0}, {"cutmix_prob": 1.0}):
        config = dataclasses.replace(PLAIN, min_box_size=4.0, **change)
        counts = np.zeros(3, int)  # images with 0, 1, 2 boxes
        for batch in batches(make(rectangles, config, batch_size=16), 3):
            np.testing.assert_array_equal((batch["classes"] >= 0).sum(1), batch["num_boxes"])
            counts += np.bincount(batch["num_boxes"], minlength=3)
            for image, boxes, classes in zip(batch["images"], batch["boxes"], batch["classes"], strict=True):
                for box, label in zip(to_px(boxes, image), classes, strict=True):
                    if label < 0:
                        continue
                    left, top, right, bottom = (box + [2, 2, -2, -2]).round().astype(int)
                    patch = image[top:bottom, left:right].reshape(-1, 3) * 255
                    if "cutmix_prob" in change:  # at least half of an own box is to be seen
                        is_color = np.abs(patch - COLORS[label]).max(1) < 3
                        assert is_color.mean() > 0.45 or patch.size < 60
                    else:  # half of the colour and half of another
                        low, high = np.array(COLORS[label]) / 2, np.array(COLORS[label]) / 2 + 127.5
                        assert (patch > low - 2).all() and (patch < high + 2).all()
        assert counts[2] == 48 if "mixup_prob" in change else (counts[1:] > 6).all(), counts


# --- stages ---


def encode(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decode(encoded: bytes, window) -> np.ndarray:
    samples = [(np.frombuffer(encoded, np.uint8), np.array(window, np.int32))]
    ((image,),) = run_stage(lambda j, w: [pipeline.decode_crop(j, w, "cpu")], samples)
    return image


def test_decode_window_cuts_what_the_whole_image_shows_and_ignores_exif():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (123, 211, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    jpeg = encode(noise.resize((422, 246)), "JPEG", quality=90, exif=exif)
    whole = decode(jpeg, (0, 0, 246, 422))
    assert whole.shape == (246, 422, 3)
    np.testing.assert_array_equal(decode(jpeg, (31, 57, 100, 201)), whole[31:131, 57:258])
    ((size,),) = run_stage(lambda j: [crops.source_size(j)], [(np.frombuffer(jpeg, np.uint8),)])
    assert size.tolist() == [246, 422]


@pytest.mark.parametrize("size", [(40, 50), (130, 300), (200, 61)])
def test_resize_is_linear_and_antialiased(size):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8))
    image = noise.resize((190, 120), Image.Resampling.BICUBIC)
    ((got,),) = run_stage(lambda i, s: [pipeline.resize(i, s)], [(np.asarray(image), np.int32(size))])
    expected = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR), int)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 4 and np.abs(got - expected).mean() < 0.5


def test_boxes_go_through_the_map_from_window_to_place():
    random = np.random.default_rng(1)
    samples, expected = [], []
    for _ in range(60):
        size, image_size = random.integers(2, 900, 2), random.integers(32, 700, 2)
        spans = []
        for side in (*size, *image_size):
            start = random.integers(0, side)
            spans.append((start, random.integers(1, side - start + 1)))
        window, place = (np.array(spans[i : i + 2]).T.ravel() for i in (0, 2))
        corners = np.sort(random.uniform(0, 1, (random.integers(0, 6), 2, 2)), axis=1)
        boxes = corners.reshape(-1, 4)
        px = np.clip(boxes * size[[1, 0, 1, 0]] - window[[1, 0, 1, 0]], 0, window[[3, 2, 3, 2]])
        expected.append(px / window[[3, 2, 3, 2]] * place[[3, 2, 3, 2]] + place[[1, 0, 1, 0]])
        samples.append((boxes.astype(np.float32), *(np.int32(x) for x in (size, window, place))))
    (got,) = run_stage(
        lambda b, s, w, p: [pipeline.boxes_to_input(pipeline.boxes_to_window(b, s, w), p)], samples
    )
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=0.01)


def test_flip_moves_pixels_boxes_and_place_together_or_not_at_all(tmp_path):
    """The first two columns of the image are another level, and a box."""
    image = np.full((20, 40, 3), 60, np.uint8)
    image[:, :10] = 200
    write_coco(tmp_path, [(i, image) for i in range(1, 9)], [(i, (0, 0, 10, 20), 0) for i in range(1, 9)])
    config = dataclasses.replace(PLAIN, flip_prob=0.5, letterbox=True, image_size=(64, 64))
    turned = 0
    for batch in batches(make(tmp_path, config), 8):
        for image, boxes in zip(batch["images"], batch["boxes"], strict=True):
            left, _, right, _ = find_rectangle(image[..., 0] > 0.6)
            np.testing.assert_allclose(to_px(boxes[0], image), [left, 16, right, 48], atol=1e-4)
            assert (left, right) in [(0, 16), (48, 64)]
            turned += left > 0
    assert 15 < turned < 49

    sample = np.int32([2, 1, 4, 3]), np.int32([6, 8])
    for coin, place in zip(
        *run_stage(lambda p, s: pipeline.random_flip(p, s, 0.5), [sample] * 9), strict=True
    ):
        assert place.tolist() == [2, 4 if coin else 1, 4, 3]  # columns 1, 2, 3 of 8 become 4, 5, 6


def test_pad_and_to_unit_against_numpy():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    sample = image, np.int32([3, 2, 5, 7]), np.int32([10, 12])
    ((padded,), (unit,)) = run_stage(
        lambda i, p, s: [pipeline.pad(color.to_unit(i), p, s), color.to_unit(i)], [sample]
    )
    expected = np.full((10, 12, 3), 127 / 255)  # Darknet's 0.5
    expected[3:8, 2:9] = image / 255
    assert unit.dtype == padded.dtype == np.float32
    np.testing.assert_allclose(padded, expected, atol=1e-6)
    np.testing.assert_allclose(unit, image / 255, atol=1e-6)


@pytest.mark.parametrize("change", [{"hue": 36.0}, {"saturation": 1.5}, {"exposure": 1.5}])
def test_training_images_are_really_augmented(rectangles, change):
    (plain,) = batches(make(rectangles, batch_size=12), 1)
    (other,) = batches(make(rectangles, dataclasses.replace(PLAIN, **change), batch_size=12), 1)
    np.testing.assert_array_equal(plain["boxes"], other["boxes"])
    is_colored = np.array([class_map(image) >= 0 for image in plain["images"]])
    differs = np.abs(plain["images"] - other["images"]).max(-1) > 0.01
    assert differs[is_colored].mean() > 0.8


# --- the whole pipeline ---


@pytest.mark.parametrize("letterboxed", [False, True])
def test_evaluation_shows_every_image_once_and_never_changes(rectangles, letterboxed):
    """48 images on 5 ranks: equal steps, in order, repeated ids tell; boxes come back exactly."""
    document = json.loads((rectangles / "instances.json").read_text())
    truth = {a["image_id"]: a["bbox"] for a in document["annotations"]}
    random = {"mosaic_prob": 1.0, "mixup_prob": 1.0, "cutmix_prob": 1.0, "multi_scale": 1.4}
    config = dataclasses.replace(PLAIN, letterbox=letterboxed, **ALL, **random)
    seen, order = {}, []
    for rank in range(5):
        loader = make(
            rectangles, config, training=False, batch_size=4, shard_id=rank, num_shards=5, seed=rank
        )
        assert loader.steps_per_epoch == 3
        for batch in batches(loader, 3):
            for i, image_id in enumerate(batch["image_ids"].reshape(-1).tolist()):
                if image_id in seen:
                    np.testing.assert_array_equal(batch["images"][i], seen[image_id])
                    continue
                seen[image_id] = image = batch["images"][i]
                order.append(image_id)
                height, width = batch["image_sizes"][i]
                expected = (0, 0, *INPUT)
                if letterboxed:
                    expected = letterbox.geometry(height, width, INPUT, centered=True)
                assert tuple(batch["letterbox"][i]) == expected
                boxes = batch["boxes"][i][:1]
                original = np.asarray(letterbox.boxes_from_letterbox(boxes, batch["letterbox"][i], INPUT))
                x, y, w, h = truth[image_id]
                ltrb = np.array([x, y, x + w, y + h]) / [width, height, width, height]
                np.testing.assert_allclose(original[0], ltrb, atol=2e-5)
                rectangle = find_rectangle(class_map(image) == batch["classes"][i, 0])
                np.testing.assert_allclose(rectangle, to_px(boxes[0], image), atol=1.0)
    assert order == list(truth)


def test_ranks_share_the_images_and_the_size_but_not_the_augmentation(rectangles, tmp_path):
    config = dataclasses.replace(PLAIN, multi_scale=1.4)
    ranks = [
        batches(make(rectangles, config, batch_size=6, shard_id=rank, num_shards=2), 4) for rank in (0, 1)
    ]
    seen = [{tuple(box) for batch in rank for box in batch["boxes"][:, 0].round(4)} for rank in ranks]
    assert len(seen[0]) == len(seen[1]) == 24 and not seen[0] & seen[1]  # one epoch
    sizes = [[batch["images"].shape for batch in rank] for rank in ranks]
    assert sizes[0] == sizes[1] and len(set(sizes[0])) > 1

    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    directory = write_coco(
        tmp_path, [(i, image) for i in range(1, 9)], [(i, (9, 9, 30, 30), 0) for i in range(1, 9)]
    )
    config = dataclasses.replace(PLAIN, jitter=0.3)
    pictures = []
    for rank in (0, 1):
        for batch in batches(make(directory, config, batch_size=4, shard_id=rank, num_shards=2), 2):
            pictures += [picture.tobytes() for picture in batch["images"]]
    assert len(set(pictures)) == 16  # of one and the same image


def test_seed_decides_everything_and_zero_is_one(rectangles):
    config = dataclasses.replace(PLAIN, **ALL, mosaic_prob=0.5, mixup_prob=0.5, cutmix_prob=0.5)

    def run(seed, threads=1):
        return batches(make(rectangles, config, seed=seed, num_threads=threads), 3)

    first = run(0)
    for again in (run(0), run(0, threads=2)):
        for one, other in zip(first, again, strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
    assert not np.array_equal(first[0]["images"], run(1)[0]["images"])


def test_last_epochs_are_without_mosaic_mixup_and_cutmix(rectangles):
    (plain,) = batches(make(rectangles, batch_size=12), 1)
    assert (plain["num_boxes"] == 1).all()
    for prob in ("mosaic_prob", "mixup_prob", "cutmix_prob"):
        config = dataclasses.replace(PLAIN, **{prob: 1.0})
        (mixed,) = batches(make(rectangles, config, batch_size=12), 1)
        (closed,) = batches(make(rectangles, config, batch_size=12, mosaic=False), 1)
        assert (mixed["num_boxes"] > 1).any()
        for name in plain:
            np.testing.assert_array_equal(closed[name], plain[name])


def test_stages_that_are_off_are_not_in_the_graph(rectangles):
    operators = {
        "MultiPaste": {"mosaic_prob": 0.5},
        "Hsv": {"hue": 36.0},
        "Flip": {"flip_prob": 0.5},
        "BatchPermutation": {"cutmix_prob": 0.5},
    }
    changes = {name: value for change in operators.values() for name, value in change.items()}
    everything = dataclasses.replace(PLAIN, **changes)
    for config, training, on in ((PLAIN, True, False), (everything, True, True), (everything, False, False)):
        graph = make(rectangles, config, training=training).pipeline.serialize()
        for name in operators:
            assert (name.encode() in graph) == on, (name, training)


def test_batch_of_one(rectangles):
    config = dataclasses.replace(PLAIN, mosaic_prob=0.5, mixup_prob=1.0, cutmix_prob=1.0, min_box_size=2.0)
    counts = [int(batch["num_boxes"][0]) for batch in batches(make(rectangles, config, batch_size=1), 40)]
    assert min(counts) <= 1 and max(counts) > 1  # mosaics of one image; nothing else to mix it with
    config = dataclasses.replace(config, mosaic_prob=0.0)
    assert all(batch["num_boxes"] == 1 for batch in batches(make(rectangles, config, batch_size=1), 12))


def test_awkward_images(tmp_path):
    """No boxes; 500 boxes, some too small; a crowd; a box without area; grey and CMYK files."""
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (200, 300, 3), np.uint8))
    files = [(1, encode(image, "JPEG")), (2, encode(image.convert("L"), "JPEG"))]
    files += [(3, encode(image.convert("CMYK"), "JPEG")), (4, encode(image, "JPEG"))]
    sides = random.uniform(3.0, 90.0, (450, 2))
    corners = random.uniform(0, 1, (450, 2)) * (np.array([300, 200]) - sides)
    large = [(2, ltwh, 1) for ltwh in np.concatenate([corners, sides], 1).tolist()]
    small = [(2, (10.0 + i, 5.0, 0.9, 30.0), 1) for i in range(50)]
    others = [(3, (0, 0, 300, 200)), (4, (5, 5, 50, 50)), (4, (1, 1, 0, 9)), (4, (60, 5, 200, 100))]
    others = [(image_id, ltwh, 1) for image_id, ltwh in others]
    directory = write_coco(tmp_path, files, large + small + others, ".jpg", crowds={503})
    loader = make(directory, batch_size=4, training=False, count_lost=True)
    (batch,) = batches(loader, 1)
    assert batch["num_boxes"].tolist() == [0, 200, 1, 1]
    np.testing.assert_array_equal((batch["classes"] >= 0).sum(1), batch["num_boxes"])
    np.testing.assert_array_equal(batch["boxes"][0], -1)
    np.testing.assert_array_equal(batch["classes"][0], -1)
    assert batch["lost"].tolist() == [[0, 0], [50, 250], [0, 0], [0, 0]]
    kept = batch["boxes"][1]
    areas = np.sort(np.prod(kept[:, 2:] - kept[:, :2], 1))
    expected = np.sort(np.prod(sides, 1))[-200:] / (300 * 200)
    np.testing.assert_allclose(areas, expected, rtol=1e-3)
    np.testing.assert_allclose(batch["boxes"][3, 0] * [300, 200, 300, 200], [5, 5, 55, 55], atol=1e-3)

    config = dataclasses.replace(PLAIN, **ALL, mosaic_prob=0.5, mixup_prob=0.5, cutmix_prob=0.5)
    for batch in batches(make(directory, config, batch_size=4, count_lost=True), 10):
        for name, tensor in batch.items():
            assert np.isfinite(tensor).all(), name
        assert batch["num_boxes"].max() <= 200 and (batch["lost"] >= 0).all()
        for boxes, count in zip(batch["boxes"], batch["num_boxes"], strict=True):
            sides_px = (boxes[:count, 2:] - boxes[:count, :2]) * INPUT[::-1]
            assert (sides_px >= 1 - 1e-3).all() and (boxes[:count] >= 0).all() and (boxes[:count] <= 1).all()
            assert (boxes[count:] == -1).all()


def test_boxes_just_above_and_below_the_minimum(tmp_path):
    image = np.zeros((*INPUT, 3), np.uint8)
    boxes = [(10, 10, 4.1, 50), (30, 10, 3.9, 50), (50, 10, 50, 4.1), (50, 80, 50, 3.9)]
    directory = write_coco(tmp_path, [(1, image)], [(1, box, 0) for box in boxes])
    config = dataclasses.replace(PLAIN, min_box_size=4.0)
    (batch,) = batches(make(directory, config, batch_size=1, training=False, count_lost=True), 1)
    got = batch["boxes"][0, :2] * [192, 128, 192, 128]
    np.testing.assert_allclose(got[:, :2], [[10, 10], [50, 10]], atol=1e-3)
    assert batch["num_boxes"].tolist() == [2] and batch["lost"].tolist() == [[2, 0]]


# --- tf.data ---


def test_dataset_has_the_promised_elements(rectangles):
    config = dataclasses.replace(PLAIN, jitter=0.3, mosaic_prob=0.5)
    for training in (True, False):
        loader = make(rectangles, config, training=training, count_lost=True, seed=5)
        images_spec, targets_spec = loader.dataset().element_spec
        assert images_spec == tf.TensorSpec((8, *INPUT, 3), tf.float32)
        names = ["boxes", "classes", "num_boxes"]
        names += [] if training else ["image_ids", "image_sizes", "letterbox"]
        assert list(loader.element_spec) == ["images", *names, "lost"]
        images, targets = next(iter(loader.dataset()))
        (batch,) = batches(loader, 1)  # the DALI pipeline of the same loader starts alike
        assert images.numpy().min() >= 0 and 0.5 < images.numpy().max() <= 1
        np.testing.assert_array_equal(images, batch["images"])
        assert set(targets) == set(targets_spec) == {*names, "lost"}
        for name, tensor in targets.items():
            assert tensor.shape == targets_spec[name].shape == loader.element_spec[name].shape
            assert tensor.dtype == targets_spec[name].dtype
            np.testing.assert_array_equal(tensor, batch[name].reshape(tensor.shape), err_msg=name)
    assert targets["boxes"].shape == (8, 200, 4)


def test_multi_scale_dataset_has_unknown_sides(rectangles):
    config = dataclasses.replace(PLAIN, multi_scale=1.4, mosaic_prob=0.5)
    loader = make(rectangles, config)
    assert loader.dataset().element_spec[0] == tf.TensorSpec((8, None, None, 3), tf.float32)
    shapes = {tuple(images.shape) for images, _ in loader.dataset().take(8)}
    assert len(shapes) > 2
    assert make(rectangles, config, training=False).element_spec["images"].shape == (8, *INPUT, 3)


def test_without_targets(rectangles):
    loader = make(rectangles, training=False, with_targets=False)
    assert list(loader.element_spec) == ["images", "image_ids", "image_sizes", "letterbox"]
    images, extra = next(iter(loader.dataset()))
    assert images.shape == (8, *INPUT, 3)
    assert extra["image_ids"].numpy().tolist() == [1000 + 7 * i for i in range(8)]
    assert extra["image_sizes"].numpy().tolist()[:3] == [list(size) for size in SIZES[:3]]


@pytest.mark.parametrize("tiles", ["batch", "fresh"])
def test_iterator_resumes_bit_exactly_in_the_middle_of_an_epoch(rectangles, tmp_path, tiles):
    mixed = {"mosaic_prob": 0.5, "mixup_prob": 0.5, "cutmix_prob": 0.5, "multi_scale": 1.4}
    config = dataclasses.replace(PLAIN, **ALL, **mixed, mosaic_tiles=tiles)

    def fresh():
        return iter(make(rectangles, config, seed=3).dataset())

    iterator = fresh()
    for _ in range(3):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "loader")
    expected = [next(iterator) for _ in range(6)]  # into the second epoch
    restored = fresh()
    tf.train.Checkpoint(iterator=restored).restore(path).assert_consumed()
    for images, targets in expected:
        got_images, got_targets = next(restored)
        np.testing.assert_array_equal(got_images, images)
        for name, tensor in targets.items():
            np.testing.assert_array_equal(got_targets[name], tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("training, tiles", [(False, "batch"), (True, "batch"), (True, "fresh")])
def test_gpu_graph_gives_what_the_cpu_graph_gives(rectangles, training, tiles):
    """The same random numbers, so the same mosaics; PNGs are decoded alike, and resized alike to a level."""
    mixed = {"mosaic_prob": 0.5, "mixup_prob": 0.5, "cutmix_prob": 0.5, "multi_scale": 1.4}
    config = dataclasses.replace(PLAIN, letterbox=True, **ALL, **mixed, mosaic_tiles=tiles)
    cpu = make(rectangles, config, training=training)
    gpu = make(rectangles, config, training=training, device_id=0)
    for _ in range(3):
        for name, one, other in zip(cpu.element_spec, cpu.pipeline.run(), gpu.pipeline.run(), strict=True):
            one, other = np.asarray(one.as_tensor()), np.asarray(other.as_cpu().as_tensor())
            if name == "images":
                assert np.abs(one - other).max() < 4.5 / 255
            else:
                np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
