"""TFRecords in a bucket: check, cache and readers, and objects that are missing, damaged or changed."""

import itertools
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from common import files
from common.data import storage, tf_readers, tfrecord
from common.data.check import loader_errors
from common.data.check.issues import DataError
from common.data.open import open_images, open_source, open_tfrecords
from common.data.readers import tfrecord_reader
from tests.common.reading import read
from tests.common.record_writing import LABELS, flip, record, write
from tests.refusal import refusal


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """Each test has an empty cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    return files.cache_directory()


@pytest.fixture
def remote(bucket, drawn_records) -> str:
    """The prefix of `drawn_records` in a bucket."""
    upload_set(drawn_records, f"{bucket}/sets/drawn")
    return f"{bucket}/sets/drawn"


def upload_set(prefix: pathlib.Path, path: str) -> None:
    for file in prefix.parent.glob(f"{prefix.name}*"):
        if file.suffix != ".idx":
            storage.upload(file, path + file.name.removeprefix(prefix.name))


def replace(path: str, content: bytes, directory: pathlib.Path) -> None:
    (directory / "content").write_bytes(content)
    storage.upload(directory / "content", path)


def test_records_in_a_bucket_have_the_annotations_of_the_same_records_on_a_disk(remote, drawn_records):
    source, local = open_tfrecords(f"{remote}-*"), open_tfrecords(f"{drawn_records}-*.tfrecord")
    assert source.size == 12 and source.fingerprint == local.fingerprint
    assert source.label_map == local.label_map and source.formats == local.formats
    assert source.records.files == tuple(f"{remote}-0000{shard}-of-00003.tfrecord" for shard in range(3))
    assert [source.encoded(row) for row in range(12)] == [local.encoded(row) for row in range(12)]
    assert "no usable" not in str(source.annotations.summary())


def test_records_in_a_bucket_are_downloaded_once_and_again_only_after_a_change(remote, monkeypatch, tmp_path):
    downloads, local_copy = [], storage.local_copy
    monkeypatch.setattr(storage, "local_copy", lambda path: downloads.append(path) or local_copy(path))
    expected = open_tfrecords(f"{remote}-*").fingerprint
    names = [f"{remote}-0000{shard}-of-00003.tfrecord" for shard in range(3)]
    assert sorted(downloads) == names
    assert open_tfrecords(f"{remote}-*").fingerprint == expected and len(downloads) == 3
    content = storage.read(names[1])
    size = tfrecord.FRAME + int.from_bytes(content[:8], "little")
    replace(names[1], content[size:] + content[:size], tmp_path)
    assert open_tfrecords(f"{remote}-*").fingerprint != expected
    assert downloads[3:] == [names[1]]


def test_cache_has_no_copy_of_the_records_of_a_bucket(remote, cache):
    source = open_tfrecords(f"{remote}-*")
    assert {os.path.splitext(name)[1] for name in os.listdir(cache)} == {".records", ".idx"}
    for index, path in zip(source.records.indexes, source.records.files, strict=True):
        assert pathlib.Path(index).parent == cache
        with storage.local_copy(path) as copy:
            assert pathlib.Path(index).read_bytes() == tfrecord.format_index(tfrecord.record_spans(copy))


def test_files_on_a_disk_and_in_a_bucket_are_refused_as_one_data_set(remote, drawn_records):
    local = f"{drawn_records}-00001-of-00003.tfrecord"
    message = refusal(open_tfrecords, f"{remote}-00000-*,{local}", f"{drawn_records}.label_map.json")
    assert message == (
        f"{remote}-00000-of-00003.tfrecord is in a bucket, {local} is not: put all files in one place"
    )


@pytest.mark.parametrize("training", [True, False])
def test_readers_of_dali_and_tensorflow_read_a_bucket_like_a_disk(remote, drawn_records, training):
    sources = [open_tfrecords(f"{prefix}-*.tfrecord") for prefix in (remote, drawn_records)]
    options = {"training": training, "seed": 5, "shard_id": 1, "num_shards": 2}
    for a, b in zip(*(read(source.read, 12, **options) for source in sources), strict=True):
        assert (a.image_id, a.encoded) == (b.image_id, b.encoded)
        np.testing.assert_array_equal(a.boxes, b.boxes)
        np.testing.assert_array_equal(a.labels, b.labels)
    datasets = [tf_readers.examples(source, **options) for source in sources]
    for a, b in zip(*(itertools.islice(dataset, 6) for dataset in datasets), strict=True):
        assert set(a) == {"encoded", "boxes", "labels", "image_id"}
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


def test_reader_given_paths_of_a_bucket_reads_them_without_the_data_check(remote):
    paths = storage.match(f"{remote}-*.tfrecord")
    label_map = open_tfrecords(f"{remote}-*").label_map
    examples = read(lambda **options: tfrecord_reader(paths, label_map, training=False, **options), 12)
    assert len({example.image_id for example in examples}) == 12


def test_records_of_a_bucket_are_copied_to_the_cache_once_if_one_lacks_a_key(bucket, tmp_path, monkeypatch):
    write(tmp_path / "a-0.tfrecord", record(source_id=b"1"), record(source_id=b"b.png"))
    write(tmp_path / "a-1.tfrecord", record(source_id=b"3"))
    LABELS.save(tmp_path / "a.label_map.json")
    upload_set(tmp_path / "a", f"{bucket}/a")
    source = open_tfrecords(f"{bucket}/a-*", f"{bucket}/a.label_map.json")
    assert {pathlib.Path(file).parent for file in source.records.files} == {files.cache_directory()}
    assert [example.image_id for example in read(source.read, 3, training=False)] == [1, 2, 3]
    assert [issue.count for issue in source.annotations.issues if issue.kind == "record-numbered"] == [1]
    storage.remove(f"{bucket}/a-0.tfrecord")
    source.check_unchanged()
    storage.upload(tmp_path / "a-0.tfrecord", f"{bucket}/a-0.tfrecord")
    monkeypatch.setattr(storage, "local_copy", None)
    again = open_tfrecords(f"{bucket}/a-*", f"{bucket}/a.label_map.json")
    assert again.records.files == source.records.files


def test_pattern_or_label_map_that_is_not_in_the_bucket_is_named(remote, bucket):
    message = refusal(open_tfrecords, f"{bucket}/sets/none-*", error=DataError)
    assert f"no file matches: '{bucket}/sets/none-*'" in message
    storage.remove(f"{remote}.label_map.json")
    message = refusal(open_tfrecords, f"{remote}-*")
    assert f"no label map next to {remote}-00000-of-00003.tfrecord ({remote}.label_map.json)" in message
    message = refusal(open_tfrecords, f"{remote}-*", label_map=f"{bucket}/none.json")
    assert message.startswith(f"{bucket}/none.json: ") and "no such object" in message


def test_damaged_and_truncated_objects_are_named_with_the_record(remote, tmp_path):
    first, second = (f"{remote}-0000{shard}-of-00003.tfrecord" for shard in range(2))
    replace(first, storage.read(first)[:-9], tmp_path)
    (tmp_path / "second").write_bytes(storage.read(second))
    flip(tmp_path / "second", 100)
    storage.upload(tmp_path / "second", second)
    message = refusal(open_tfrecords, f"{remote}-*", error=DataError)
    assert f"file that is cut off: {first} record 3 at byte" in message
    assert f"record whose checksum is wrong: {second} record 0 at byte 0" in message


@pytest.mark.parametrize("pipeline_type", ["dali_cpu", "tensorflow"])
@pytest.mark.parametrize("fault", ["removed", "cut off", "unreachable"])
def test_object_that_fails_during_training_is_named(remote, tmp_path, monkeypatch, pipeline_type, fault):
    source = open_tfrecords(f"{remote}-*")
    path = source.records.files[1]
    if fault == "removed":
        storage.remove(path)
        expected = f"{path} is no longer there since the check: restore it, or start a new run"
    elif fault == "cut off":
        replace(path, storage.read(path)[:1000], tmp_path)
        expected = f"{path} has changed since the check: restore it, or start a new run"
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        # DALI also keeps the first number of attempts that it sees. It reads nothing in these cases.
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        storage.forget_client()
        expected = f"{remote}-0000"
    if fault == "unreachable" and pipeline_type == "dali_cpu":
        error = RuntimeError("DALI reads the address only once")
    elif pipeline_type == "dali_cpu":
        with pytest.raises((RuntimeError, IndexError), match=r"fn\.readers\.tfrecord") as raised:
            read(source.read, 24, training=True)
        error = raised.value
    else:
        with pytest.raises(tf.errors.OpError) as raised:
            list(itertools.islice(tf_readers.examples(source, training=True), 24))
        error = raised.value
    message = str(loader_errors.explain(error, source, pipeline_type))
    assert message.startswith(expected) and "\n" not in message
    if fault == "unreachable":
        assert message.endswith("127.0.0.1:9 cannot be reached: check the network and AWS_ENDPOINT_URL")


BUSY = "the store was busy, or cut an answer off; DALI cannot repeat such a request"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(("status", 503), BUSY, id="busy once"),
        pytest.param(("cut",), BUSY, id="cut off once"),
        pytest.param(("stall", 30), "Timeout was reached", id="silent three times", marks=pytest.mark.slow),
    ],
)
def test_fault_of_a_store_that_ends_the_loader_of_dali_is_explained(remote, faults, fault, reason):
    source = open_tfrecords(f"{remote}-*")
    faults.set(*fault, request="GET /", skip=20, count=3 if fault[0] == "stall" else 1)
    with pytest.raises(RuntimeError) as raised:
        read(source.read, 36, training=False)
    message = str(loader_errors.explain(raised.value, source, "dali_cpu"))
    assert message.startswith(
        f"the loader (dali_cpu) could not read from {remote.rpartition('/')[0]}: {reason}."
    )
    assert message.endswith(" Now all objects can be read: run the same command again, which resumes the run")


def test_object_that_the_store_still_refuses_after_the_loader_of_dali_has_stopped_is_named(remote, faults):
    source = open_tfrecords(f"{remote}-*")
    faults.set("status", 503, request="-00001-of-")
    with pytest.raises(RuntimeError) as raised:
        read(source.read, 12, training=False)
    message = str(loader_errors.explain(raised.value, source, "dali_cpu"))
    assert message.startswith(f"{remote}-00001-of-00003.tfrecord: http://127.0.0.1:")
    assert message.endswith(
        "answered with HTTP status 503 (SlowDown) 3 times: try again later, or raise AWS_MAX_ATTEMPTS"
    )


def test_silent_answers_of_a_store_are_repeated_by_dali_and_do_not_change_what_is_read(remote, faults):
    source = open_tfrecords(f"{remote}-*")
    expected = read(source.read, 12, training=False)
    faults.set("stall", 5, skip=2, count=1)
    for a, b in zip(read(source.read, 12, training=False), expected, strict=True):
        assert (a.image_id, a.encoded) == (b.image_id, b.encoded)
    requests = [line for line in faults.requests() if line.startswith("GET")]
    assert requests[2] == requests[3]


def test_changed_object_is_an_error_and_a_silent_store_only_a_warning(remote, tmp_path, monkeypatch, capsys):
    source = open_tfrecords(f"{remote}-*")
    source.check_unchanged()
    replace(source.records.files[2], storage.read(source.records.files[2])[::-1], tmp_path)
    message = f"{source.records.files[2]} has changed since the check"
    assert refusal(source.check_unchanged).startswith(message)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    storage.forget_client()
    source.check_unchanged()
    assert "warning: unknown whether the data have changed: s3://" in capsys.readouterr().err


def test_images_and_json_in_a_bucket_are_refused_with_the_command_that_converts_them():
    message = refusal(open_source, "s3://data/images", "instances.json")
    assert message.startswith(
        "--train_images=s3://data/images is in a bucket: only TFRecords and WebDataset are"
    )
    assert "tools/convert.py --from=coco --to=tfrecord --output=s3://" in message
    message = refusal(open_source, "images", "s3://data/a.json", split="eval")
    assert message.startswith("--eval_annotations=s3://data/a.json is in a bucket")
    assert refusal(open_images, "s3://data/*.jpg").endswith("copy the images to a disk")
    assert "is in a bucket" in refusal(files.make_output_directory, "s3://data/run")


def test_dali_imported_after_tensorflow_is_refused_for_a_bucket(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    storage.check_dali()
    monkeypatch.setattr(storage.sys, "modules", {"tensorflow": tf, "nvidia.dali": None})
    assert "import nvidia.dali before tensorflow" in refusal(storage.check_dali)


def test_encrypted_store_without_the_certificates_of_dali_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "_CERTIFICATES", tmp_path / "certs" / "ca.crt")
    for endpoint in ("", "https://127.0.0.1:9"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert refusal(storage.check_dali).endswith(f"ca-certificates.crt {tmp_path}/certs/ca.crt")
    monkeypatch.setenv("DALI_S3_NO_VERIFY_SSL", "1")
    storage.check_dali()
    monkeypatch.delenv("DALI_S3_NO_VERIFY_SSL")
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs" / "ca.crt").touch()
    storage.check_dali()
