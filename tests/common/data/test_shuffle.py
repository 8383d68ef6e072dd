"""The order of records and samples in training: --shuffle=global and --shuffle=buffer."""

import functools
import itertools
import os
import pathlib
import resource

import numpy as np
import pytest
import tensorflow as tf

from common import files
from common.data import parts, sharding, storage
from common.data.loader import from_pipeline
from common.data.open import open_source
from common.errors import UserError
from tests.common.reading import assert_iterator_resumes, build, ids, read
from tests.common.record_writing import LABELS, record, write
from tests.common.shard_writing import sample, write_tar

SHUFFLES = ("global", "buffer")
SIZES = (1, 70, 23)  # records of each file: 94 in all, with the ids 0 to 93


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """Each test has an empty cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    return files.cache_directory()


def write_set(directory: pathlib.Path, kind: str, sizes=SIZES) -> str:
    """Writes files with that many numbered images, and returns their pattern."""
    numbers = itertools.count()
    for file, size in enumerate(sizes):
        image_ids = list(itertools.islice(numbers, size))
        if kind == "tfrecord":
            write(directory / f"a-{file}.tfrecord", *(record(source_id=b"%d" % i) for i in image_ids))
        else:
            write_tar(directory / f"a-{file}.tar", *(sample(f"{i:06}", image_id=i) for i in image_ids))
    LABELS.save(directory / "a.label_map.json")
    return f"{directory}/a-*"


@functools.cache
def _written(root: pathlib.Path, kind: str) -> str:
    directory = root / kind
    directory.mkdir()
    return write_set(directory, kind)


@pytest.fixture(params=["tfrecord", "webdataset"])
def pattern(request, tmp_path_factory) -> str:
    """The pattern of a set with SIZES."""
    return _written(tmp_path_factory.getbasetemp(), request.param)


def open_set(pattern: str, label_map: pathlib.Path | None = None):
    return open_source(file_pattern=pattern, label_map=label_map or label_map_of(pattern))


def label_map_of(pattern: str) -> pathlib.Path:
    return pathlib.Path(pattern).with_name("a.label_map.json")


def epochs(source, shuffle, num_epochs, num_shards=1, seed=0) -> list[list[list[int]]]:
    """Returns the image ids that each shard reads in each epoch: [epoch][shard]."""
    orders = []
    for shard in range(num_shards):
        options = {"shard_id": shard, "num_shards": num_shards, "shuffle": shuffle, "seed": seed}
        size = 94 * (shard + 1) // num_shards - 94 * shard // num_shards
        order = ids(read(source.read, num_epochs * size, batch_size=3, training=True, **options))
        orders.append([order[i : i + size] for i in range(0, len(order), size)])
    return [list(of_epoch) for of_epoch in zip(*orders, strict=True)]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_ranks_together_read_each_image_of_uneven_files_once_per_epoch(pattern, shuffle, num_shards):
    source = open_set(pattern)
    of_epochs = epochs(source, shuffle, 3, num_shards, seed=5)
    orders = [tuple(itertools.chain.from_iterable(shards)) for shards in of_epochs]
    assert all(sorted(order) == list(range(94)) for order in orders)
    assert len({*orders, tuple(range(94))}) == 4
    assert epochs(source, shuffle, 3, num_shards, seed=5) == of_epochs
    assert epochs(source, shuffle, 1, num_shards, seed=6)[0] not in of_epochs


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_restored_iterator_continues_within_an_epoch_with_equal_bits_on_a_disk_and_in_a_bucket(
    pattern, shuffle, bucket, tmp_path, monkeypatch
):
    monkeypatch.setattr(sharding, "SHUFFLE_BUFFER", 16)  # DALI fills it with one request per sample
    for path in storage.match(pattern):
        storage.upload(path, f"{bucket}/{os.path.basename(path)}")
    for place, after in ((pattern, 30), (f"{bucket}/a-*", 5)):  # an epoch has 23.5 batches
        source = open_set(place, label_map_of(pattern))

        def iterate(source=source):
            options = {"shard_id": 1, "num_shards": 2, "training": True, "seed": 4, "shuffle": shuffle}
            pipeline = build(lambda: source.read(**options)[3:], batch_size=2)
            return iter(from_pipeline(pipeline, tf.TensorSpec([2], tf.int64), device_id=None).prefetch(2))

        assert_iterator_resumes(iterate, tmp_path, before=5, after=after)


# --- parts ---


def indexes_of(directory: pathlib.Path, sizes, header="") -> list[str]:
    """Writes index files with the lines `0 0`, `0 1`, ...; the first number is that of the file."""
    paths = []
    for file, size in enumerate(sizes):
        lines = [header.format(size)] * bool(header) + [f"{file} {row}" for row in range(size)]
        paths.append(f"{directory}/{file}.idx")
        pathlib.Path(paths[-1]).write_text("".join(f"{line}\n" for line in lines))
    return paths


@pytest.mark.parametrize("header", ["", "v1.2 {}"])
@pytest.mark.parametrize(("sizes", "part_size"), [((0, 40, 16, 1), 16), ((500, 0, 140), 64)])
def test_parts_hold_each_record_once_in_runs_of_one_file(tmp_path, monkeypatch, header, sizes, part_size):
    monkeypatch.setattr(parts, "MAX_PARTS", 10)
    names = [f"file{number}" for number in range(len(sizes))]
    indexes = indexes_of(tmp_path, sizes, header)
    of_parts, paths = parts.cut(names, indexes, header)
    contents = [pathlib.Path(path).read_text().splitlines() for path in paths]
    if header:
        assert [lines.pop(0) for lines in contents] == [f"v1.2 {len(lines)}" for lines in contents]
    rows = [np.array([line.split() for line in lines], int) for lines in contents]
    for name, table in zip(of_parts, rows, strict=True):
        assert {f"file{file}" for file in table[:, 0]} == {name}
        assert len(table) <= part_size
        assert np.count_nonzero(np.diff(table[:, 1]) != 1) <= len(table) // parts.RUN + 2
    everything = [(file, row) for file, size in enumerate(sizes) for row in range(size)]
    assert sorted(map(tuple, np.concatenate(rows).tolist())) == everything
    assert not np.array_equal(np.concatenate(rows), everything)

    pathlib.Path(paths[1]).unlink()  # by a program that removes old files
    parts.cut(names, indexes, header)
    assert [pathlib.Path(path).read_text().splitlines()[len(header) > 0 :] for path in paths] == contents
    monkeypatch.setattr(parts, "write_into", None)
    assert parts.cut(names, indexes, header) == (of_parts, paths)
    with pytest.raises(TypeError):  # other records: these parts would have to be written
        parts.cut(names, indexes[::-1], header)


def test_parts_that_cannot_be_written_are_an_error_that_names_the_cache(tmp_path, monkeypatch, cache):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts, "write_into", full_disk)
    with pytest.raises(
        UserError, match=rf"cannot write {cache}.*parts \(to use .*XDG_CACHE_HOME\): No space"
    ):
        parts.cut(["a"], indexes_of(tmp_path, [3]))


def test_webdataset_opens_more_parts_than_the_process_may_open_files_at_first(tmp_path, monkeypatch):
    source = open_set(write_set(tmp_path, "webdataset", [160]))
    monkeypatch.setattr(parts, "RUN", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, hard))
    try:
        assert sorted(ids(read(source.read, 160, batch_size=8, training=True))) == list(range(160))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_webdataset_of_more_parts_than_the_host_allows_open_files_is_an_error_in_one_line(
    tmp_path, monkeypatch
):
    source = open_set(write_set(tmp_path, "webdataset", [160]))
    monkeypatch.setattr(parts, "RUN", 1)
    limit = len(os.listdir("/proc/self/fd")) + 100
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    message = rf"DALI keeps 160 files of WebDataset open, but a process may open only {limit} here: raise"
    with pytest.raises(UserError, match=message):
        read(source.read, 160, batch_size=8, training=True)
