"""WebDataset shards in a bucket."""

import itertools

import numpy as np
import pytest

from common.data import storage, tf_readers
from common.data.open import open_source
from tests.common.reading import numbered_images, read
from tests.common.shard_writing import write_shards
from tests.refusal import refusal


@pytest.fixture
def remote(bucket, tmp_path, monkeypatch) -> str:
    """The prefix of three shards in a bucket; `tmp_path` has the same shards on a disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    source = numbered_images(tmp_path, range(100, 113))
    for path in write_shards(source.annotations, source.images_dir, tmp_path / "t", num_shards=3):
        storage.upload(path, f"{bucket}/sets/{path.rpartition('/')[2]}")
    storage.upload(tmp_path / "t.label_map.json", f"{bucket}/sets/t.label_map.json")
    return f"{bucket}/sets/t"


@pytest.mark.parametrize("training", [True, False])
def test_readers_read_shards_of_a_bucket_like_those_of_a_disk(remote, tmp_path, training):
    sources = [open_source(file_pattern=f"{prefix}-*.tar") for prefix in (remote, tmp_path / "t")]
    assert sources[0].fingerprint == sources[1].fingerprint
    assert [sources[0].encoded(row) for row in range(13)] == [sources[1].encoded(row) for row in range(13)]
    options = {"training": training, "seed": 5, "shard_id": 1, "num_shards": 2}
    for a, b in zip(*(read(source.read, 13, **options) for source in sources), strict=True):
        assert (a.image_id, a.encoded) == (b.image_id, b.encoded)
        np.testing.assert_array_equal(a.boxes, b.boxes)
    datasets = [tf_readers.examples(source, **options) for source in sources]
    for a, b in zip(*(itertools.islice(dataset, 6) for dataset in datasets), strict=True):
        assert (a["image_id"], a["encoded"]) == (b["image_id"], b["encoded"])


def test_shards_of_a_bucket_are_downloaded_once_and_an_error_names_one_that_changed_later(
    remote, tmp_path, monkeypatch
):
    source = open_source(file_pattern=f"{remote}-*.tar")
    source.check_unchanged(strict=True)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "local_copy", None)
        assert open_source(file_pattern=f"{remote}-*.tar").fingerprint == source.fingerprint
    storage.upload(tmp_path / "t-00000-of-00003.tar", f"{remote}-00001-of-00003.tar")
    message = refusal(source.check_unchanged)
    assert message.startswith(f"{remote}-00001-of-00003.tar has changed since the check")
    storage.remove(f"{remote}-00001-of-00003.tar")
    assert "is no longer there" in refusal(source.check_unchanged)


def test_shards_on_a_disk_and_in_a_bucket_are_refused_as_one_data_set(remote, tmp_path):
    pattern, label_map = f"{remote}-*.tar,{tmp_path}/t-*.tar", f"{tmp_path}/t.label_map.json"
    message = refusal(open_source, file_pattern=pattern, label_map=label_map)
    assert "put all files in one place" in message
