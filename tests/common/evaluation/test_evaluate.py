"""Tests evaluation on several ranks against one process and pycocotools.

The ranks are threads. They read real shards, but the network is fake.
"""

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
from common.data.open import open_coco
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


def outcomes_of(count, work):
    """Returns what `work(ranks)` returns or raises on each of `count` ranks."""

    def outcome(ranks):
        try:
            return work(ranks)
        except Exception as error:
            return error

    return run_on_ranks(count, outcome)


@pytest.fixture(autouse=True)
def no_progress_bar(monkeypatch):
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
            annotations = [a for a in truth["annotations"] if a["image_id"] == image["id"]] * 2
            boxes = np.array([*(a["bbox"] for a in annotations), [10, 10, 30, 30]], np.float64)
            boxes[:, 2:] += boxes[:, :2]
            boxes += random.normal(0, 0.1 * np.ptp(boxes[:, ::2], axis=1)[:, None], boxes.shape)
            boxes = np.clip(boxes / ([image["width"], image["height"]] * 2), 0, 1)
            classes = np.append(label_map.classes_of([a["category_id"] for a in annotations]), 0)
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


@pytest.fixture
def source(drawn):
    """Image files. The order of their ids in the json is not ascending."""
    return open_coco(str(drawn / "images"), str(drawn / "instances.json"))


@pytest.fixture
def network(source):
    return Network(source)


def on_shard(run, source, ranks, batch_size, network, shard=None, **options):
    loader = ShardLoader(source, batch_size, *(shard or (ranks.rank, ranks.world_size)))
    label_map = network.source.label_map
    return run(network, loader, label_map, ranks=ranks, **options)


evaluate = functools.partial(on_shard, evaluation.evaluate)
predict = functools.partial(on_shard, evaluation.predict, title="x")


# --- several ranks give the results of one process ---


def test_metrics_of_one_process_equal_pycocotools(source, network, drawn):
    metrics, results, _ = evaluate(source, Ranks(), 1, network)
    truth = json.loads((drawn / "instances.json").read_text())
    written = json.loads(coco_metrics.encode_detections(results))
    stats, _ = by_pycocotools(truth, written)
    assert [metrics[name] for name in coco_metrics.NAMES] == pytest.approx(stats.tolist(), abs=1e-12, rel=0)
    assert 0.1 < metrics["AP"] < 0.9
    # The order of detections with equal scores changes the metrics.
    other_order, _ = by_pycocotools(truth, written[::-1])
    assert np.abs(other_order - stats).max() > 1e-3


def test_detections_are_sorted_by_image_id_and_then_in_the_order_of_the_network(source, network):
    results = evaluate(source, Ranks(), 1, network).results
    expected = []
    for image_id in sorted(network.table):
        _, scores, classes = network.table[image_id]
        rows = zip(scores.tolist(), classes.tolist(), strict=True)
        expected += [(image_id, source.label_map.category_ids[c], score) for score, c in rows if c >= 0]
    assert [(r["image_id"], r["category_id"], r["score"]) for r in results] == expected
    assert list(network.table) != sorted(network.table)
    assert len({r["image_id"] for r in results}) < source.size


@pytest.mark.parametrize(("count", "batch_size"), [(1, 5), (3, 1), (5, 2), (8, 5)])
def test_evaluation_with_any_number_of_ranks_and_batch_size_equals_that_of_one_process(
    source, network, count, batch_size
):
    expected = evaluate(source, Ranks(), 1, network)
    for result in outcomes_of(count, lambda ranks: evaluate(source, ranks, batch_size, network)):
        assert result == expected


def test_metrics_are_computed_on_rank_0_only_by_the_requested_backend(source, network, monkeypatch):
    backends, score = [], coco_metrics.score
    monkeypatch.setattr(
        coco_metrics,
        "score",
        lambda truth, results, backend: backends.append(backend) or score(truth, results),
    )
    outcomes_of(3, lambda ranks: evaluate(source, ranks, 2, network, coco_backend="faster"))
    evaluate(source, Ranks(), 2, network)
    assert backends == ["faster", "pycocotools"]


def test_images_without_annotations_give_the_same_detections_on_all_ranks(drawn, network):
    network.table = dict(enumerate(network.table.values()))  # an image's id is its position here
    source = ImageListSource(tuple(map(str, sorted((drawn / "images").iterdir()))))
    expected = predict(source, Ranks(), 2, network)
    assert len({r["image_id"] for r in expected}) > 8
    results = outcomes_of(5, lambda ranks: predict(source, ranks, 2, network))
    assert results == [expected] * 5


# --- an error on one rank ends all ranks ---


def message_of(outcomes, failing_rank):
    """Returns the message of one rank's UserError. Asserts that the other ranks name this rank."""
    message = str(outcomes[failing_rank])
    assert isinstance(outcomes[failing_rank], UserError), message
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != failing_rank]
    assert all(isinstance(other, OtherRankError) for other in others), others
    assert {str(other) for other in others} == {f"rank {failing_rank}: {message}"}
    return message


def test_network_output_that_is_not_finite_ends_all_ranks_with_the_image_id(source, network):
    image_id = int(source.annotations.image_ids[source.size * 2 // 3])
    network.table[image_id][0][3, 2] = np.nan
    message = message_of(outcomes_of(3, lambda ranks: evaluate(source, ranks, 2, network)), 2)
    assert message.startswith(f"the output for image {image_id} is not finite")
    with pytest.raises(UserError, match=f"^{message}$"):
        evaluate(source, Ranks(), 2, network)


def test_image_damaged_after_opening_ends_all_ranks_with_the_file_name(drawn, network, tmp_path):
    shutil.copytree(drawn, tmp_path / "data")
    source = open_coco(str(tmp_path / "data" / "images"), str(tmp_path / "data" / "instances.json"))
    file = tmp_path / "data" / "images" / source.annotations.file_names[10]
    file.write_bytes(b"no image")
    assert file.name in message_of(outcomes_of(3, lambda ranks: evaluate(source, ranks, 1, network)), 2)


def test_evaluation_with_crowds_as_the_only_ground_truth_ends_all_ranks_with_one_error(source, network):
    crowds = np.ones_like(source.annotations.is_crowd)
    source.__dict__["annotations"] = dataclasses.replace(source.annotations, is_crowd=crowds)
    message = message_of(outcomes_of(3, lambda ranks: evaluate(source, ranks, 4, network)), 0)
    assert "have no boxes" in message


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ((1, 2), "12 images were evaluated, 6 of them different, not 12"),
        ((0, 1), "24 images were evaluated, 12 of them different, not 12"),
    ],
    ids=["same shard twice", "all images twice"],
)
def test_evaluation_of_wrong_shards_raises_an_error_on_all_ranks(source, network, shard, message):
    for outcome in outcomes_of(2, lambda ranks: predict(source, ranks, 4, network, shard=shard)):
        assert isinstance(outcome, RuntimeError)
        assert message in str(outcome)


# --- on_batch, which is called after every batch ---


def test_on_batch_callback_is_called_equally_often_on_all_ranks_if_one_rank_fails(source, network):
    network.table[int(source.annotations.image_ids[0])][0][0, 0] = np.inf
    calls = {rank: [] for rank in range(3)}

    def work(ranks):
        def on_batch(done, total):
            calls[ranks.rank].append((done, total))
            assert ranks.gather(done) == [done] * 3

        return evaluate(source, ranks, 1, network, on_batch=on_batch)

    assert "not finite" in message_of(outcomes_of(3, work), 0)
    assert all(batches == [(1, 4), (2, 4), (3, 4), (4, 4)] for batches in calls.values())


def test_exception_of_the_on_batch_callback_ends_the_evaluation_and_is_not_wrapped(source, network):
    calls = []

    def on_batch(done, total):
        calls.append(done)
        if done == 2:
            raise UserError("stop")

    outcomes = outcomes_of(3, lambda ranks: evaluate(source, ranks, 1, network, on_batch=on_batch))
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(UserError, "stop")] * 3
    assert sorted(calls) == [1] * 3 + [2] * 3
