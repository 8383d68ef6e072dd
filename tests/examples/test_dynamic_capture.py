"""Tests dynamic_capture.py: its batches equal those of dynamic_detection.py, bit for bit."""

import itertools

import dynamic_capture as example
import nvidia.dali.experimental.dynamic as ndd
import pytest
from dynamic_detection import Stream, training_batch

SIZE = (64, 96)
BATCH = 30  # of 100 images: the fourth batch has images of two epochs


@pytest.fixture(autouse=True)
def synchronous_operators():
    with ndd.EvalMode.sync_cpu:
        yield


def to_bytes(batch: dict[str, ndd.Batch]) -> dict[str, bytes]:
    return {name: example.to_numpy(values).tobytes() for name, values in batch.items()}


def called(stream: Stream, count: int) -> list[dict[str, bytes]]:
    return [
        to_bytes(training_batch(*batch, SIZE) | {"image_ids": batch[0].image_ids})
        for batch in itertools.islice(stream, count)
    ]


def captured(stream: example.CapturedStream, count: int) -> list[dict[str, bytes]]:
    batches = []
    for batch, image_ids in itertools.islice(stream, count):
        # DALI runs what it cannot capture call by call, without a warning.
        assert type(batch["images"]).__name__ == "CapturedBatch"
        batches.append(to_bytes(batch | {"image_ids": image_ids}))
    return batches


def test_captured_batches_and_checkpoints_equal_those_of_the_dynamic_api(fuzzed, tmp_path):
    data = (fuzzed.source.images_dir, f"{fuzzed.source.images_dir}/instances.json", BATCH)
    pattern = str(tmp_path / "at-{seq}.json")
    expected = called(Stream(*data), 7)
    assert len({batch["images"] for batch in expected}) == 7

    stream = example.CapturedStream(Stream(*data), BATCH, SIZE)
    assert captured(stream, 3) == expected[:3] and stream.step == 3
    stream.save(pattern)

    stream = Stream(*data)
    stream.restore(pattern)
    assert called(stream, 2) == expected[3:5]
    stream.save(pattern)

    stream = Stream(*data)
    stream.restore(pattern)
    stream = example.CapturedStream(stream, BATCH, SIZE)
    assert captured(stream, 2) == expected[5:] and stream.step == 7


def test_dali_refuses_the_checkpoint_of_a_reader_in_capture_mode(fuzzed):
    """If this test fails, the reader of dynamic_capture.py can be captured, too."""
    files = [f"{fuzzed.source.images_dir}/instances.json"]
    reader = ndd.readers.File(files=files, enable_checkpointing=True)  # type: ignore[call-arg]
    with pytest.raises(NotImplementedError, match="not supported in capture mode"):
        reader.next_epoch(1, capture=True)
