"""A source and a chain at work: every image once, resumed exactly, in TensorFlow, and what goes wrong."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from common.errors import UserError
from tests.tools.preprocessing import pictures_on_disk
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.preprocessor import Preprocessor

RANDOM = "resize:20x24 | rotate:-20..20,fill=0 | crop:16x16,x=0..1,y=0..1 | flip:0.5"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pictures")
    pictures_on_disk.write(directory / "b")
    pictures_on_disk.write(directory / "a", pictures_on_disk.SIZES[:2])
    return open_image_source("files", str(directory))


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
@pytest.mark.parametrize("batch_size", [3, 7, 16])
def test_every_image_once_in_order(source, api, batch_size):
    found = list(Preprocessor(source=source, batch_size=batch_size).samples(api))
    assert [sample.position for sample in found] == list(range(7))
    assert [sample.name for sample in found] == [f"a/{i}.png" for i in range(2)] + [
        f"b/{i}.png" for i in range(5)
    ]
    assert [sample.label for sample in found] == [0] * 2 + [1] * 5
    sizes = [*pictures_on_disk.SIZES[:2], *pictures_on_disk.SIZES]
    assert [sample.image.shape[:2] for sample in found] == sizes


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_share_the_images(source, api, num_shards):
    parts = [
        [
            (sample.position, sample.image.tobytes())
            for sample in Preprocessor(
                source=source, batch_size=2, shard_id=shard_id, num_shards=num_shards
            ).samples(api)
        ]
        for shard_id in range(num_shards)
    ]
    whole = [(sample.position, sample.image.tobytes()) for sample in Preprocessor(source=source).samples()]
    assert list(itertools.chain(*parts)) == whole


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_samples_begin_anew_each_time(source, api):
    """Whatever was read before: of 7 images this shard has 3, and the other one a batch more."""
    work = Preprocessor(source=source, ops="resize:8x8", batch_size=3, num_shards=2)
    read = lambda: [(sample.name, sample.image.tobytes()) for sample in work.samples(api)]  # noqa: E731
    first = read()
    assert read() == first
    next(work.samples(api))
    work.pipeline.run()
    assert read() == first


def test_ranks_draw_differently(tmp_path):
    pictures_on_disk.write(tmp_path, [(30, 30)])
    (tmp_path / "list.txt").write_text("0.png\n" * 4)
    source = open_image_source("list", str(tmp_path / "list.txt"))
    parts = [
        [
            sample.image.tobytes()
            for sample in Preprocessor(source=source, ops=RANDOM, shard_id=i, num_shards=2).samples()
        ]
        for i in range(2)
    ]
    assert len({*parts[0], *parts[1]}) == 4


def test_a_pipeline_goes_on_where_it_was(source):
    """Order and draws: three batches, then the rest from the checkpoint, as if never interrupted."""
    make = lambda: Preprocessor(source=source, ops=RANDOM, batch_size=2, training=True, seed=4)  # noqa: E731
    pipeline = make().pipeline
    for _ in range(3):
        pipeline.run()
    saved = pipeline.checkpoint()
    expected = [[part.as_array() for part in pipeline.run()] for _ in range(5)]
    again = make().restored(saved)
    for batch in expected:
        for part, other in zip(batch, again.run(), strict=True):
            np.testing.assert_array_equal(part, other.as_array())


def test_training_shuffles_and_stays_complete(source):
    work = Preprocessor(source=source, ops="resize:8x8", batch_size=7, training=True, seed=1)
    everything = {
        sample.image.tobytes() for sample in Preprocessor(source=source, ops="resize:8x8").samples()
    }
    orders = []
    for _ in range(3):
        images, _ = work.pipeline.run()
        orders.append([image.tobytes() for image in images.as_array()])
        assert set(orders[-1]) == everything
    assert orders[0] != orders[1]
    with pytest.raises(ValueError, match="training order has no positions"):
        next(work.samples())


def test_the_dataset_is_the_pipeline(source):
    make = lambda: Preprocessor(source=source, ops=RANDOM, batch_size=3, training=True, seed=2)  # noqa: E731
    pipeline = make().pipeline
    for images, labels in make().dataset().take(4):
        expected = pipeline.run()
        np.testing.assert_array_equal(images, expected[0].as_array())
        np.testing.assert_array_equal(labels, expected[1].as_array())
    assert images.dtype == tf.uint8
    floats = Preprocessor(source=source, ops="crop_mirror_normalize:8x8,mean=imagenet").dataset()
    assert floats.element_spec[0].dtype == tf.float32


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
@pytest.mark.parametrize(
    ("ops", "said"),
    [
        ("crop:35x35", "image 6 ('b/4.png'): crop: the window reaches beyond the image; fill=0 pads smaller"),
        (
            "decode_region:start=0/0,shape=41/30",
            "image 5 ('b/3.png'): decoders.image_slice: The cropping window",
        ),
        (
            "resize:5,short=4",
            "image 0 ('a/0.png'): resize: Exactly one method of specifying size must be used",
        ),
        ("warp_affine:angle=3,matrix=1/0/0/0/1/0", "--ops: warp_affine: matrix and angle exclude each other"),
        ("brightness:2..1", "image 0 ('a/0.png'): random.uniform: Invalid range [2, 1)"),
        ("decode:gray | crop_mirror_normalize:mean=imagenet", "image 0 ('a/0.png'): crop_mirror_normalize: "),
        ("warp_affine:matrix=0/0/0/0/0/0,inverse_map=0", "image 0 ('a/0.png'): "),
    ],
)
def test_an_image_that_an_operator_refuses_is_named(source, api, ops, said):
    work = Preprocessor(source=source, ops=ops, batch_size=3)
    with pytest.raises(UserError) as caught:
        list(work.samples(api))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_what_was_drawn_may_be_at_fault(source, api):
    """Where no image fails by itself, the reason is told all the same: flip takes no float16."""
    said = set()
    for seed in range(6):
        work = Preprocessor(source=source, ops="cast:float16 | flip:0.5", batch_size=7, seed=seed)
        with pytest.raises(UserError) as caught:
            list(work.samples(api))
        place, _, reason = str(caught.value).partition(": ")
        assert reason.removeprefix("flip: ") == "The element type float16 is not supported"
        said.add(place)
    assert "one of the images from 0 on, or what was drawn for it" in said


def test_the_device_and_its_number_belong_together(source):
    with pytest.raises(ValueError, match="need 'cpu' and None"):
        Preprocessor(source=source, device="gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("api", ["pipeline", "dynamic"])
def test_on_a_gpu_the_pixels_are_the_same(source, api):
    ops = "resize:short=30 | crop:24x24 | color_twist:brightness=1.1 | crop_mirror_normalize:mean=imagenet"
    on_cpu = [sample.image for sample in Preprocessor(source=source, ops=ops).samples()]
    on_gpu = [
        sample.image
        for sample in Preprocessor(source=source, ops=ops, device="gpu", device_id=0).samples(api)
    ]
    for a, b in zip(on_cpu, on_gpu, strict=True):
        np.testing.assert_allclose(a, b, atol=3 / 57)  # rounding: PNG is lossless, so decoding is equal
