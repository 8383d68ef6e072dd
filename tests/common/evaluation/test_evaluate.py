"""The ranks are threads. They read real shards, but the network is fake."""

import dataclasses
import functools
import json
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf

from common.data import loader as loaders
from common.data import tf_readers
from common.data.open import open_coco, open_tfrecords
from common.data.sources import ImageListSource
from common.distributed.ranks import Ranks
from common.errors import OtherRankError, UserError
from common.evaluation import coco_metrics
from common.evaluation import evaluate as evaluation
from tests.common.evaluation.reference import by_pycocotools
from tests.common.thread_ranks import run_on_ranks

ROWS = 14
SCORES = (0.25, 0.5, 0.75)  # few values, so that many detections have equal scores


# --- helpers: ranks, loaders and networks ---


def on_ranks(count, work):
    def outcome(ranks):
        try:
            return work(ranks)
        except Exception as error:
            return error

    return run_on_ranks(count, outcome)


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    """A bar of one thread redirects the stdout of all threads."""
    bar = types.SimpleNamespace(step=lambda: None)
    monkeypatch.setattr(evaluation.progress, "Bar", lambda title, total: bar)


class ShardLoader:
    """Gives image ids in place of images, as Network expects."""

    training = saveable = False
    element_spec = None
    pipeline_type = "dali_cpu"
    seed = 0

    def __init__(self, source, batch_size, shard_id=0, num_shards=1):
        self.size, self.batch_size = source.size, batch_size
        self.shard_id, self.num_shards = shard_id, num_shards
        self.steps_per_epoch = loaders.steps_per_epoch(source.size, batch_size * num_shards, training=False)
        self.source = self.opened_source = source

    def iterator(self):
        def facts(example):
            size = tf_readers.image_size_tf(example["encoded"])
            extra = {"image_ids": example["image_id"], "image_sizes": size, "letterbox": tf.zeros(4)}
            return example["image_id"], extra

        return iter(tf_readers.loader_examples(self).map(facts).batch(self.batch_size))


class Network:
    """Returns prepared detections for each image id. Some are wrong, and many scores are equal."""

    def __init__(self, source):
        self.source = source
        truth, label_map = source.annotations.ground_truth(), source.annotations.label_map
        random = np.random.default_rng(0)
        self.table = {}
        for number, image in enumerate(truth["images"]):
            own = [a for a in truth["annotations"] if a["image_id"] == image["id"]] * 2
            boxes = np.array([*(a["bbox"] for a in own), [10, 10, 30, 30]], np.float64)
            boxes[:, 2:] += boxes[:, :2]
            boxes += random.normal(0, 0.1 * np.ptp(boxes[:, ::2], axis=1)[:, None], boxes.shape)
            boxes = np.clip(boxes / ([image["width"], image["height"]] * 2), 0, 1)
            classes = np.append(label_map.classes_of([a["category_id"] for a in own]), 0)
            is_wrong = random.random(len(classes)) < 0.2
            classes[is_wrong] = random.integers(label_map.num_classes, size=is_wrong.sum())
            order = random.permutation(np.flatnonzero((boxes[:, 2:] - boxes[:, :2] > 0.01).all(axis=1)))
            order = order[: 0 if number % 5 == 2 else ROWS]
            padding = ROWS - len(order)
            boxes = np.pad(boxes[order], ((0, padding), (0, 0))).astype(np.float32)
            classes = np.pad(classes[order], (0, padding), constant_values=-1).astype(np.int32)
            self.table[image["id"]] = boxes, random.choice(SCORES, ROWS).astype(np.float32), classes

    def __call__(self, images, letterbox):
        rows = [self.table[image_id] for image_id in images.numpy().tolist()]
        boxes, scores, classes = (np.stack(column) for column in zip(*rows, strict=True))
        finite = np.isfinite(boxes).all(axis=(1, 2))
        return tuple(map(tf.convert_to_tensor, (boxes, scores, classes, finite)))


@pytest.fixture(scope="module")
def drawn_source(drawn):
    return open_coco(str(drawn / "images"), str(drawn / "instances.json"))


@pytest.fixture(scope="module", params=["files", "records"])
def source(request, drawn_source, drawn_records):
    """Image files, or records in another order."""
    if request.param == "files":
        return drawn_source
    records = open_tfrecords(f"{drawn_records}*.tfrecord")
    assert records.annotations.image_ids.tolist() != sorted(records.annotations.image_ids)
    return records


def on_shard(run, source, ranks, batch_size, network, shard=None, **options):
    loader = ShardLoader(source, batch_size, *(shard or (ranks.rank, ranks.world_size)))
    label_map = network.source.label_map
    return run(network, loader, label_map, ranks=ranks, **options)


evaluate = functools.partial(on_shard, evaluation.evaluate)
predict = functools.partial(on_shard, evaluation.predict, title="x")


# --- several ranks give the results of one process ---


@pytest.fixture(scope="module")
def alone(source):
    network = Network(source)
    return network, evaluate(source, Ranks(), 1, network)


def test_a_single_process_finds_what_pycocotools_finds(source, alone, drawn):
    _, (metrics, results, _) = alone
    truth = json.loads((drawn / "instances.json").read_text())
    if source.name != "coco":
        truth = source.annotations.ground_truth()  # the boxes in records are clipped to the image
    written = json.loads(coco_metrics.encode_detections(results))
    stats, _ = by_pycocotools(truth, written)
    assert [metrics[name] for name in coco_metrics.NAMES] == pytest.approx(stats.tolist(), abs=1e-12, rel=0)
    assert 0.1 < metrics["AP"] < 0.9
    # The order of detections with equal scores changes the metrics.
    other, _ = by_pycocotools(truth, written[::-1])
    assert np.abs(other - stats).max() > 1e-3


def test_detections_come_by_image_id_and_then_as_the_network_gave_them(source, alone):
    network, (_, results, _) = alone
    expected = []
    for image_id in sorted(network.table):
        _, scores, classes = network.table[image_id]
        rows = zip(scores.tolist(), classes.tolist(), strict=True)
        expected += [(image_id, source.label_map.category_ids[c], score) for score, c in rows if c >= 0]
    assert [(r["image_id"], r["category_id"], r["score"]) for r in results] == expected
    assert len({r["image_id"] for r in results}) < source.size


@pytest.mark.parametrize(("count", "batch_size"), [(1, 5), (3, 1), (5, 2), (8, 5)])
def test_any_ranks_and_batches_find_what_one_process_finds(source, alone, count, batch_size):
    network, expected = alone
    for found in on_ranks(count, lambda ranks: evaluate(source, ranks, batch_size, network)):
        assert found == expected


def test_rank_0_counts_with_the_backend_that_is_asked_for(drawn_source, monkeypatch):
    network = Network(drawn_source)
    asked, score = [], coco_metrics.score
    monkeypatch.setattr(
        coco_metrics, "score", lambda truth, found, backend: asked.append(backend) or score(truth, found)
    )
    on_ranks(3, lambda ranks: evaluate(drawn_source, ranks, 2, network, coco_backend="faster"))
    evaluate(drawn_source, Ranks(), 2, network)
    assert asked == ["faster", "pycocotools"]


@pytest.mark.parametrize("count", [1, 5])
def test_images_without_annotations(drawn, drawn_source, count):
    network = Network(drawn_source)
    network.table = dict(enumerate(network.table.values()))  # an image's id is its position here
    source = ImageListSource(tuple(map(str, sorted((drawn / "images").iterdir()))))
    first, *others = on_ranks(count, lambda ranks: predict(source, ranks, 2, network))
    assert len({r["image_id"] for r in first}) > 8
    assert all(other == first for other in others)


# --- an error on one rank ends all ranks ---


def problem_of(outcomes, culprit):
    line = str(outcomes[culprit])
    assert isinstance(outcomes[culprit], UserError), line
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != culprit]
    assert all(isinstance(other, OtherRankError) for other in others), others
    assert {str(other) for other in others} == {f"rank {culprit}: {line}"}
    return line


@pytest.mark.parametrize("culprit", [0, 2])
def test_output_that_is_not_finite_ends_all_ranks(drawn_source, culprit):
    network = Network(drawn_source)
    image_id = int(drawn_source.annotations.image_ids[drawn_source.size * culprit // 3])
    network.table[image_id][0][3, 2] = np.nan
    line = problem_of(on_ranks(3, lambda ranks: evaluate(drawn_source, ranks, 2, network)), culprit)
    assert line.startswith(f"the output for image {image_id} is not finite")
    with pytest.raises(UserError, match=f"^{line}$"):
        evaluate(drawn_source, Ranks(), 2, network)


def test_an_image_that_was_damaged_meanwhile_ends_all_ranks(drawn, tmp_path):
    shutil.copytree(drawn, tmp_path / "data")
    source = open_coco(str(tmp_path / "data" / "images"), str(tmp_path / "data" / "instances.json"))
    network = Network(source)
    file = tmp_path / "data" / "images" / source.annotations.file_names[10]
    file.write_bytes(b"no image")
    assert file.name in problem_of(on_ranks(3, lambda ranks: evaluate(source, ranks, 1, network)), 2)


def test_what_rank_0_finds_out_when_it_counts_ends_all_ranks(drawn):
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    network = Network(source)
    crowds = np.ones_like(source.annotations.is_crowd)
    source.__dict__["annotations"] = dataclasses.replace(source.annotations, is_crowd=crowds)
    line = problem_of(on_ranks(3, lambda ranks: evaluate(source, ranks, 4, network)), 0)
    assert "have no boxes" in line


@pytest.mark.parametrize(
    ("shards", "num_shards", "images"), [((0, 0), 2, 12), ((1, 1), 2, 12), ((0, 0), 1, 24)]
)
def test_a_wrong_shard_is_our_mistake_and_found_on_all_ranks(drawn_source, shards, num_shards, images):
    network = Network(drawn_source)

    def work(ranks):
        return predict(drawn_source, ranks, 4, network, shard=(shards[ranks.rank], num_shards))

    for outcome in on_ranks(2, work):
        assert isinstance(outcome, RuntimeError)
        evaluated = f"{images} images were evaluated, {12 // num_shards} of them different"
        assert f"{evaluated}, not 12" in str(outcome)


# --- on_batch, which is called after every batch ---


def test_on_batch_is_called_alike_on_all_ranks_whatever_happens(drawn_source):
    network = Network(drawn_source)
    network.table[int(drawn_source.annotations.image_ids[0])][0][0, 0] = np.inf
    calls = {rank: [] for rank in range(3)}

    def work(ranks):
        def on_batch(done, total):
            calls[ranks.rank].append((done, total))
            assert ranks.gather(done) == [done] * 3

        return evaluate(drawn_source, ranks, 1, network, on_batch=on_batch)

    assert "not finite" in problem_of(on_ranks(3, work), 0)
    assert all(seen == [(1, 4), (2, 4), (3, 4), (4, 4)] for seen in calls.values())


@pytest.mark.parametrize("count", [1, 3])
def test_what_on_batch_raises_passes_through(drawn_source, count):
    network, calls = Network(drawn_source), []

    def on_batch(done, total):
        calls.append(done)
        if done == 2:
            raise UserError("stop")

    outcomes = on_ranks(count, lambda ranks: evaluate(drawn_source, ranks, 1, network, on_batch=on_batch))
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(UserError, "stop")] * count
    assert sorted(calls) == [1] * count + [2] * count
