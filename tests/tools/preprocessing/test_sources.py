"""Every source of images: the same from both APIs and from Python, in parts, in order and shuffled."""

import collections

import numpy as np
import pytest
from nvidia import dali

from common.dali_ops import shard_range
from common.datacheck.images import ImagePolicy
from common.datacheck.issues import DataError
from common.errors import UserError
from tests.tools.preprocessing.reading import build, by_dynamic, by_pipeline, flat, key, names_of, run
from tests.tools.preprocessing.source_writing import COUNT, IMAGES, LABELS, WRITERS, labels_of, pixels
from tools.preprocessing.image_source import KINDS, image_reader, open_image_source
from tools.preprocessing.reading import Part

SHUFFLED = sorted(set(WRITERS) - {"external-generator", "external-batches"})
ENCODED = sorted(set(WRITERS) - {"numpy"})


def open_written(case, directory, images=IMAGES, labels=LABELS, **options):
    """The source, and the names that it should have."""
    kind, write = WRITERS[case]
    path, names = write(directory, images, labels)
    if kind == "coco":
        options["annotations"] = f"{directory}/instances.json"
    return open_image_source(kind, path, on_report=lambda issues: None, **options), names


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(case): the source of seven images, opened once."""
    opened = {}

    def of(case):
        if case not in opened:
            opened[case] = open_written(case, tmp_path_factory.mktemp(case))
        return opened[case]

    return of


def expected(case):
    """[key] of all samples, in order."""
    images = [np.frombuffer(image, np.uint8) for image in IMAGES]
    if case == "numpy":
        images = [pixels(number) for number in range(COUNT)]
    return [key(sample) for sample in zip(images, labels_of(case), strict=True)]


def test_every_kind_is_tried():
    assert {kind for kind, _ in WRITERS.values()} == set(KINDS)


@pytest.mark.parametrize("case", WRITERS)
def test_what_is_said_of_the_images(written, case):
    source, names = written(case)
    assert source.kind == WRITERS[case][0]
    assert source.size == COUNT and names_of(source) == names
    assert source.labels.dtype == np.int32 and source.labels.tolist() == labels_of(case)
    assert source.label_names == ({0: "a", 1: "b ü"} if case == "files" else {})
    assert source.is_decoded == (case == "numpy")
    # Python reads only what DALI cannot.
    assert (source.reader is None) == case.startswith("external")
    loaded = zip(map(source.load, range(COUNT)), source.labels.tolist(), strict=True)
    assert [key(sample) for sample in loaded] == expected(case)


@pytest.mark.parametrize("case", WRITERS)
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_every_image_once_in_order_by_both_apis(written, case, num_shards):
    source, _ = written(case)
    seen = []
    for shard_id in range(num_shards):
        call = Part(source, shard_id=shard_id, num_shards=num_shards)
        begin, end = shard_range(COUNT, shard_id, num_shards)
        steps = -(-COUNT // (3 * num_shards))
        batches = by_pipeline(call, 2 * steps)
        padded = [key(sample) for sample in flat(batches[:steps])]
        own = expected(case)[begin:end]
        assert padded == own + [own[-1]] * (3 * steps - len(own))
        assert [key(sample) for sample in flat(batches[steps:])] == padded  # and so on for ever
        dynamic = by_dynamic(call)
        assert [key(sample) for sample in flat(dynamic)] == own
        assert [len(batch) for batch in dynamic] == [min(3, end - i) for i in range(begin, end, 3)]
        seen += own
    assert seen == expected(case)


@pytest.mark.parametrize("case", SHUFFLED)
@pytest.mark.parametrize("num_shards", [1, 2])
def test_training_goes_through_all_images_in_a_new_order_each_epoch(written, case, num_shards):
    source, _ = written(case)
    bounds = [shard_range(COUNT, shard_id, num_shards) for shard_id in range(num_shards)]
    lengths = [end - begin for begin, end in bounds]
    passed_on = case.startswith("lmdb")  # its readers pass their parts on
    epochs = [[] for _ in range(3)]
    for shard_id in range(num_shards):
        call = Part(source, shard_id=shard_id, num_shards=num_shards, training=True, seed=5)
        of_epochs = [lengths[(shard_id + epoch * passed_on) % num_shards] for epoch in range(3)]
        count = sum(of_epochs)
        samples = [key(sample) for sample in flat(by_pipeline(call, -(-count // 3)))][:count]
        again = [key(sample) for sample in flat(by_pipeline(call, -(-count // 3)))][:count]
        assert again == samples
        dynamic = [key(sample) for sample in flat(by_dynamic(call, epochs=3))]
        begin, own = 0, lengths[shard_id]
        for epoch, length in enumerate(of_epochs):
            epochs[epoch] += samples[begin : begin + length]
            begin += length
            assert len(set(dynamic[epoch * own : (epoch + 1) * own])) == own
    assert all(collections.Counter(epoch) == collections.Counter(expected(case)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, expected(case)]}) == 4
    other = Part(source, num_shards=num_shards, training=True, seed=6)
    first = Part(source, num_shards=num_shards, training=True, seed=5)
    assert [key(s) for s in flat(by_pipeline(other, 5))] != [key(s) for s in flat(by_pipeline(first, 5))]


@pytest.mark.parametrize("case", ["external-generator", "external-batches"])
def test_an_iterable_is_not_shuffled(written, case):
    with pytest.raises(UserError, match="an iterable cannot be shuffled: give a sequence"):
        Part(written(case)[0], training=True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", ["files", "lmdb-caffe", "recordio", "webdataset", "numpy", *SHUFFLED[1:3]])
def test_a_pipeline_goes_on_where_it_was(written, case, training):
    call = Part(written(case)[0], shard_id=1, num_shards=2, training=training, seed=2)
    pipeline = build(call)
    for _ in range(3):
        run(pipeline)
    state = pipeline.checkpoint()
    rest = [[key(sample) for sample in run(pipeline)] for _ in range(4)]
    resumed = build(call, checkpoint=state)
    assert [[key(sample) for sample in run(resumed)] for _ in range(4)] == rest


@pytest.mark.parametrize("case", ["external-generator", "external-batches"])
def test_an_iterable_is_run_through_again_to_go_on(written, case):
    call = Part(written(case)[0])
    pipeline = build(call)
    run(pipeline)
    resumed = build(call, checkpoint=pipeline.checkpoint())
    assert [key(sample) for sample in flat([run(resumed), run(resumed)])][:4] == expected(case)[3:]


@pytest.mark.parametrize("case", ENCODED)
def test_a_truncated_image_is_named_or_left_out(tmp_path, case):
    images = [*IMAGES[:2], IMAGES[2][:-20], *IMAGES[3:]]
    (tmp_path / "1").mkdir()
    names = WRITERS[case][1](tmp_path / "1", images, LABELS)[1]
    named = {
        "tfrecord": "a.tfrecord record 2",
        "recordio": "x.rec record 2",
        "external-of-batches": "sample-2",
    }.get(case, names[2])
    (tmp_path / "2").mkdir()
    with pytest.raises(DataError, match="image that is cut off") as caught:
        open_written(case, tmp_path / "2", images)
    assert named in str(caught.value) and "\n" not in str(caught.value)

    (tmp_path / "3").mkdir()
    reports = []
    kind, write = WRITERS[case]
    path, _ = write(tmp_path / "3", images, LABELS)
    source = open_image_source(
        kind,
        path,
        policy=ImagePolicy(on_bad_image="skip"),
        annotations=f"{tmp_path / '3'}/instances.json" if kind == "coco" else None,
        on_report=reports.append,
    )
    assert reports[0]["image-truncated"].count == 1 and reports[0]["image-truncated"].skipped
    kept = [sample for i, sample in enumerate(expected(case)) if i != 2]
    assert source.size == 6 and names[2] not in names_of(source)
    for shard_id in range(2):
        call = Part(source, shard_id=shard_id, num_shards=2)
        part = kept[slice(*shard_range(6, shard_id, 2))]
        assert [key(sample) for sample in flat(by_pipeline(call, 1))] == part
        assert [key(sample) for sample in flat(by_dynamic(call))] == part


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(UserError, match="unknown source 'lmbd': did you mean 'lmdb'"):
        open_image_source("lmbd", "x")
    with pytest.raises(UserError, match="--annotations and --images are for --source=coco"):
        open_image_source("files", "x", images="y")
    with pytest.raises(UserError, match="needs one more: --annotations=FILE"):
        open_image_source("coco", "x")


# --- readers for graphs ---

IN_GRAPHS = ("tfrecord", "lmdb-caffe", "recordio", "webdataset", "numpy", "external-function")


@pytest.mark.parametrize("case", IN_GRAPHS)
def test_readers_for_graphs(written, tmp_path, case):
    kind, write = WRITERS[case]
    path, _ = write(tmp_path, IMAGES, LABELS)
    options = {"training": True, "shard_id": 1, "num_shards": 2, "seed": 4}
    # With checkpointing, DALI 2.4 permutes later epochs otherwise.
    pipeline = dali.Pipeline(3, 1, None, enable_checkpointing=True)
    with pipeline:
        pipeline.set_outputs(*image_reader(kind, path, name="mine", **options))
    pipeline.build()
    call = Part(written(case)[0], **options)
    want = [[key(sample) for sample in batch] for batch in by_pipeline(call, 4)]
    assert [[key(sample) for sample in run(pipeline)] for _ in range(4)] == want
    if case != "external-function":
        assert pipeline.epoch_size("mine") == COUNT
