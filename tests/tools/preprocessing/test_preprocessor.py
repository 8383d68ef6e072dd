import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.refusal import refusal
from tests.tools.preprocessing import pictures_on_disk
from tests.tools.preprocessing.reading import opened
from tests.tools.preprocessing.source_writing import COUNT, LABELS, pixels, write_case
from tools.preprocessing.options import APIS
from tools.preprocessing.preprocessor import Preprocessor

RANDOM = "resize:20x24 | rotate:-20..20,fill=0 | crop:16x16,x=0..1,y=0..1 | flip:0.5"
BOTH_APIS = pytest.mark.parametrize("api", APIS)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return opened("files", pictures_on_disk.write(tmp_path_factory.mktemp("pictures")))


def arrays(outputs):
    return tuple(part.as_array() for part in outputs)


def read(work, api="pipeline"):
    return [(sample.position, sample.name, sample.image.tobytes()) for sample in work.samples(api)]


@BOTH_APIS
@pytest.mark.parametrize("batch_size", [2, 5, 16])
def test_every_image_once_in_order(source, api, batch_size):
    found = list(Preprocessor(source=source, batch_size=batch_size).samples(api))
    names = ["cats/0.png", "cats/1.png", "cats/2.png", "two dogs/3.png", "two dogs/4.png"]
    rows = [(sample.position, sample.name, sample.label, sample.layout) for sample in found]
    assert rows == [(i, name, int(i >= 3), "HWC") for i, name in enumerate(names)]
    assert tuple(sample.image.shape[:2] for sample in found) == pictures_on_disk.SIZES


@BOTH_APIS
def test_shards_share_the_images(source, api):
    works = [Preprocessor(source=source, batch_size=2, shard_id=i, num_shards=3) for i in range(3)]
    assert list(itertools.chain(*(read(work, api) for work in works))) == read(Preprocessor(source=source))
    assert [work.size for work in works] == [1, 2, 2]


@BOTH_APIS
def test_samples_begin_anew_each_time(source, api):
    work = Preprocessor(source=source, ops="resize:8x8", batch_size=2, num_shards=2)
    first = read(work, api)
    assert read(work, api) == first
    next(work.samples(api))
    work.pipeline.run()
    assert read(work, api) == first


def test_ranks_draw_differently(tmp_path):
    pictures_on_disk.write(tmp_path)
    (tmp_path / "list.txt").write_text("cats/0.png\n" * 4)
    source = opened("list", tmp_path / "list.txt")
    works = (Preprocessor(source=source, ops=RANDOM, shard_id=i, num_shards=2) for i in range(2))
    assert len({image for work in works for _, _, image in read(work)}) == 4


def test_a_pipeline_goes_on_where_it_was_and_the_dataset_is_the_pipeline(source):
    options = {"source": source, "ops": RANDOM, "batch_size": 2, "training": True, "seed": 4}
    pipeline = Preprocessor(**options).pipeline
    begun = [pipeline.run() for _ in range(3)]
    again = Preprocessor(**options).restored(pipeline.checkpoint())
    rest = [pipeline.run() for _ in range(5)]
    dataset = Preprocessor(**options).dataset().take(8)
    np.testing.assert_equal(list(map(arrays, [again.run() for _ in rest])), list(map(arrays, rest)))
    np.testing.assert_equal(list(dataset.as_numpy_iterator()), list(map(arrays, begun + rest)))


def test_training_has_no_order_of_samples(source):
    work = Preprocessor(source=source, training=True)
    assert "samples() needs training=False" in refusal(read, work, error=ValueError)


def test_the_dynamic_api_goes_on_for_epochs(source):
    batches = list(Preprocessor(source=source, batch_size=3).dynamic(epochs=2))
    assert [images.batch_size for images, _ in batches] == [3, 2, 3, 2]


@pytest.mark.parametrize("case", ["tfrecord", "lmdb-caffe", "webdataset", "external-function"])
def test_tensorflow_gets_every_source(tmp_path, case):
    kind, path, _, _ = write_case(case, tmp_path)
    options = {"source": opened(kind, path), "batch_size": COUNT}
    for images, labels in Preprocessor(ops="pad:16x12,fill=9", **options).dataset().take(2):
        assert labels.numpy().tolist() == LABELS and images.dtype == tf.uint8
        for number, image in enumerate(images.numpy()):
            np.testing.assert_array_equal(image[: 8 + number], pixels(number))
            assert image.shape == (16, 12, 3) and (image[8 + number :] == 9).all()
    floats = Preprocessor(ops="crop_mirror_normalize:8x8,mean=imagenet", **options).dataset()
    assert floats.element_spec[0].dtype == tf.float32


REFUSED_BY_OPERATORS = [
    ("crop:35x35", "image 4 ('two dogs/4.png'): crop: the crop reaches beyond the image; fill=0 pads"),
    ("resize:5,short=4", "image 0 ('cats/0.png'): resize: Exactly one method of specifying size must be"),
    ("warp_affine:angle=3,matrix=1/0/0/0/1/0", "--ops: warp_affine: matrix and angle exclude each other"),
    ("brightness:2..1", "image 0 ('cats/0.png'): random.uniform: Invalid range [2, 1)"),
    ("decode:gray | crop_mirror_normalize:mean=imagenet", "image 0 ('cats/0.png'): crop_mirror_normalize: "),
    ("warp_affine:matrix=0/0/0/0/0/0,inverse_map=0", "image 0 ('cats/0.png'): "),
]


@BOTH_APIS
@pytest.mark.parametrize(("ops", "said"), REFUSED_BY_OPERATORS)
def test_an_image_that_an_operator_refuses_is_named(source, api, ops, said):
    work = Preprocessor(source=source, ops=ops, batch_size=3)
    assert refusal(read, work, api).startswith(said)


@BOTH_APIS
def test_what_was_drawn_may_be_at_fault(source, api):
    said = []
    for seed in range(6):
        work = Preprocessor(source=source, ops="cast:float16 | flip:0.5", batch_size=5, seed=seed)
        said.append(refusal(read, work, api))
    assert all(line.endswith("The element type float16 is not supported") for line in said)
    assert any(line.startswith("an image in the batch that begins with image 0 failed: ") for line in said)


def test_the_device_and_its_number_belong_together(source):
    for device, device_id in (("gpu", None), ("cpu", 0), ("tpu", 0)):
        with pytest.raises(ValueError, match="need 'cpu' and None"):
            Preprocessor(source=source, device=device, device_id=device_id)


@pytest.mark.gpu
@BOTH_APIS
def test_on_a_gpu_the_pixels_are_the_same(source, api):
    ops = "resize:short=30 | crop:24x24 | color_twist:brightness=1.1 | crop_mirror_normalize:mean=imagenet"
    on_cpu = Preprocessor(source=source, ops=ops).samples()
    on_gpu = Preprocessor(source=source, ops=ops, device="gpu", device_id=0).samples(api)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        # CPU and GPU decode PNG equally, so only rounding differs.
        np.testing.assert_allclose(a.image, b.image, atol=3 / 57)
