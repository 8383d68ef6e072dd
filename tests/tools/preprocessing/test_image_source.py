import pytest

from common.data.check.images import ImagePolicy
from common.data.check.issues import DataError
from common.data.sharding import shard_range
from tests.tools.preprocessing.reading import by_dynamic, by_pipeline, flat, keys, names_of, opened, refused
from tests.tools.preprocessing.source_writing import IMAGES, labels_of, write_case
from tools.preprocessing.reading import Part

# (case, text by which the message identifies the image; "" stands for the image's name)
CASES = [
    *((case, "") for case in ("files", "coco", "lmdb-caffe", "lmdb-caffe2", "webdataset")),
    ("external-function", "sample-2"),
    ("tfrecord", "a.tfrecord record 2"),
    ("recordio", "x.rec record 2"),
]


@pytest.mark.parametrize(("case", "name"), CASES)
def test_a_truncated_image_is_named_or_left_out(tmp_path, case, name):
    images = [*IMAGES[:2], IMAGES[2][:-20], *IMAGES[3:]]
    kind, path, options, names = write_case(case, tmp_path, images)
    refused(kind, path, f"image that is cut off.*{name or names[2]}", DataError, **options)

    reports = []
    options["policy"] = ImagePolicy(on_bad_image="skip")
    source = opened(kind, path, reports.append, **options)
    assert reports[0]["image-truncated"].count == 1 and reports[0]["image-truncated"].skipped
    assert source.size == 6 and names[2] not in names_of(source)
    kept = [sample for i, sample in enumerate(zip(images, labels_of(case), strict=True)) if i != 2]
    for shard_id in range(2):
        call = Part(source, shard_id=shard_id, num_shards=2)
        part = kept[slice(*shard_range(6, shard_id, 2))]
        for read in (flat(by_pipeline(call, 1)), flat(by_dynamic(call))):
            assert [sample[1:] for sample in keys(read)] == part


def test_what_is_no_source_is_refused():
    said = "--annotations and --images are for --source=coco, not for --source="
    refused("lmbd", "x", "unknown source 'lmbd': did you mean 'lmdb'")
    refused("files", "x", f"{said}files", images="y")
    refused("tfrecord", "x", f"{said}tfrecord", annotations="y")
