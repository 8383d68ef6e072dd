import json

import pytest

from common.data.open import open_coco, open_source
from tests.common.record_writing import write_tfrecords
from tests.oracle.fuzzed import write_fuzzed_set


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, tuple]:
    """A hundred images with ids above 2**31. Returns {reader: (source, fields of the example's config)}."""
    directory = tmp_path_factory.mktemp("fuzzed")
    write_fuzzed_set(directory)
    annotations = directory / "instances.json"
    document = json.loads(annotations.read_text())
    for key, entries in (("id", document["images"]), ("image_id", document["annotations"])):
        for entry in entries:
            entry[key] = 2**31 + entry[key] * 7919 % 1009
    annotations.write_text(json.dumps(document))
    coco = open_coco(str(directory), str(annotations))
    write_tfrecords(coco.annotations, directory, directory / "records", num_shards=3)
    pattern, label_map = f"{directory}/records-*.tfrecord", f"{directory}/records.label_map.json"
    return {
        "coco": (coco, {"images": str(directory), "annotations": str(annotations)}),
        "tfrecord": (open_source(file_pattern=pattern), {"file_pattern": pattern, "annotations": label_map}),
    }
