"""Evaluation by many ranks: what one process finds, for any number of ranks; no rank is left waiting.

The ranks are threads that read real shards; what the network would find in an image is drawn beforehand.
"""

import contextlib
import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn, types
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common import datasets as plain
from common import loader as loaders
from common import tf_readers
from common.datacheck import datasets
from common.datacheck.datasets import open_coco, open_tfrecords
from common.datasets import ImageListSource
from common.distributed.ranks import Ranks
from common.errors import OtherRankError, UserError
from common.evaluation import coco_metrics
from common.evaluation import evaluate as evaluation
from tests.common.thread_ranks import together
from tools import synthetic
from tools.conversion.coco_to_tfrecord import write_tfrecords

NUM_IMAGES = 23
ROWS = 14  # of detections per image, padding included
SCORES = (0.25, 0.5, 0.75)  # few: most detections have an equal


# --- ranks, loaders and networks of these tests ---


def on_ranks(count, work):
    """What work(ranks) returned or raised on each of `count` ranks."""

    def outcome(ranks):
        try:
            return work(ranks)
        except Exception as error:
            return error

    return together(count, outcome)


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    """Bars redirect stdout, which belongs to all threads."""

    class Bar:
        def __init__(self, title, total):
            self.left = total

        def step(self):
            self.left -= 1
            assert self.left >= 0

    monkeypatch.setattr(evaluation.progress, "Bar", Bar)


class ShardLoader:
    """The images of one shard as their ids alone: the bare readers of DALI or of tf.data."""

    saveable = False
    element_spec = None

    def __init__(self, source, batch_size, shard_id=0, num_shards=1, pipeline_type="dali_cpu"):
        self.pipeline_type = pipeline_type
        self.size = source.size
        self.batch_size = batch_size
        self.steps_per_epoch = loaders.steps_per_epoch(source.size, batch_size * num_shards, training=False)
        self.source = self.opened_source = source
        self._options = {"shard_id": shard_id, "num_shards": num_shards, "training": False, "seed": 0}

    def dataset(self):
        return self._by_tensorflow() if self.pipeline_type == "tensorflow" else self._by_dali()

    def _by_tensorflow(self):
        def describe(example):
            image_id = example["image_id"]
            size = tf_readers.image_size_tf(example["encoded"])
            return image_id, {"image_ids": image_id, "image_sizes": size, "letterbox": tf.zeros(4)}

        examples = tf_readers.examples(self.source, **self._options).repeat().map(describe)
        return examples.batch(self.batch_size)

    def _by_dali(self):
        spec = {
            "image_ids": tf.TensorSpec((self.batch_size,), tf.int64),
            "image_sizes": tf.TensorSpec((self.batch_size, 2), tf.int32),
            "letterbox": tf.TensorSpec((self.batch_size, 4), tf.float32),
        }
        pipeline = dali.Pipeline(self.batch_size, num_threads=1, device_id=None)
        with pipeline:
            jpegs, _, _, image_ids = self.source.read(**self._options)
            sizes = fn.peek_image_shape(jpegs, dtype=types.INT32)[:2]
            pipeline.set_outputs(image_ids, image_ids, sizes, fn.zeros(shape=[4], dtype=types.FLOAT))
        pipeline.build()
        return loaders.from_pipeline(pipeline, (spec["image_ids"], spec), device_id=None)


class Network:
    """Finds in an image what was drawn for its id.

    The truth, shifted a little or a lot, under its own or another class, several times; noise; nothing at all
    in every fifth image. Scores are few, so that equal ones meet in one image and class.
    """

    def __init__(self, source, seed=0):
        truth, annotations = source.annotations.ground_truth(), source.annotations
        random = np.random.default_rng(seed)
        num_classes = annotations.label_map.num_classes
        self.table = {}
        for number, image in enumerate(truth["images"]):
            scale = np.array([image["width"], image["height"]] * 2)
            boxes, classes = [], []
            for box in (a for a in truth["annotations"] if a["image_id"] == image["id"]):
                left, top, width, height = box["bbox"]
                for _ in range(random.integers(1, 4)):
                    shift = random.normal(0, 0.12, 4) * [width, height, width, height]
                    boxes.append(np.array([left, top, left + width, top + height]) + shift)
                    right_class = annotations.label_map.classes_of([box["category_id"]])[0]
                    classes.append(random.choice([right_class, random.integers(num_classes)], p=[0.8, 0.2]))
            boxes = np.clip(np.array([*boxes, [0.1, 0.1, 0.6, 0.7] * scale]) / scale, 0, 1)
            classes = np.array([*classes, random.integers(num_classes)])
            order = random.permutation(np.flatnonzero((boxes[:, 2:] - boxes[:, :2] > 0.01).all(axis=1)))
            order = order[: 0 if number % 5 == 2 else ROWS]
            rows = np.zeros((ROWS, 4), np.float32)
            rows[: len(order)] = boxes[order]
            of = np.full(ROWS, -1, np.int32)
            of[: len(order)] = classes[order]
            self.table[image["id"]] = rows, random.choice(SCORES, ROWS).astype(np.float32), of

    def __call__(self, images, letterbox):
        rows = [self.table[image_id] for image_id in images.numpy().tolist()]
        boxes, scores, classes = (np.stack(column) for column in zip(*rows, strict=True))
        finite = np.isfinite(boxes).all(axis=(1, 2))
        return tuple(map(tf.convert_to_tensor, (boxes, scores, classes, finite)))


@pytest.fixture(scope="module")
def drawn_source(drawn):
    """Twelve images with everything that data may hold."""
    return open_coco(str(drawn / "images"), str(drawn / "instances.json"))


@pytest.fixture(scope="module", params=["files", "records"])
def truth_file(request, drawn, tmp_path_factory):
    """The json of those images, or of 23 synthetic ones that are read from records."""
    if request.param == "files":
        return drawn / "instances.json"
    return synthetic.draw_dataset(tmp_path_factory.mktemp("synthetic"), NUM_IMAGES, seed=5)


@pytest.fixture(scope="module")
def source(truth_file, drawn):
    """Both with gaps in their category ids; the records in an order of their own."""
    directory = truth_file.parent
    if directory == drawn:
        return open_coco(str(directory / "images"), str(truth_file))
    annotations = open_coco(str(directory / "images"), str(truth_file)).annotations
    write_tfrecords(annotations, directory / "images", directory / "x", num_shards=3, seed=1)
    records = open_tfrecords(f"{directory}/x*.tfrecord")
    assert records.annotations.image_ids.tolist() != sorted(records.annotations.image_ids)
    return records


def by_pycocotools(truth, detections_file):
    """The 12 numbers and the precision table (IoU, recall, category, area, detections) of two json files."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(truth)
        judge = COCOeval(coco, coco.loadRes(detections_file), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge.stats, judge.eval["precision"]


def evaluate(source, ranks, batch_size, network, pipeline_type="dali_cpu", explain=plain.explain, **options):
    options |= {"explain": explain, "ranks": ranks}
    loader = ShardLoader(source, batch_size, ranks.rank, ranks.world_size, pipeline_type)
    return evaluation.evaluate(network, loader, source.label_map, **options)


# --- the same numbers ---


@pytest.fixture(scope="module")
def alone(source):
    """(network, what a single process finds)."""
    network = Network(source)
    return network, evaluate(source, Ranks(), 1, network)


def test_a_single_process_finds_what_pycocotools_finds(source, alone, truth_file, tmp_path):
    _, (metrics, results, curves) = alone
    coco_metrics.write_detections(results, tmp_path / "detections.json")
    stats, precision = by_pycocotools(str(truth_file), str(tmp_path / "detections.json"))
    assert [metrics[name] for name in coco_metrics.NAMES] == pytest.approx(stats.tolist(), abs=1e-12, rel=0)
    assert 0.1 < metrics["AP"] < 0.9
    for k, name in enumerate(source.label_map.names):
        row = metrics["per_class"][name]
        assert row["AP"] == pytest.approx(precision[:, :, k, 0, 2].mean(), abs=1e-12, rel=0)
        assert row["AP50"] == pytest.approx(precision[0, :, k, 0, 2].mean(), abs=1e-12, rel=0)
        assert curves[name] == pytest.approx(precision[0, :, k, 0, 2], abs=1e-12, rel=0)
    # Equal scores are no formality here: in another order pycocotools finds something else.
    (tmp_path / "reversed.json").write_text(json.dumps(results[::-1]))
    other, _ = by_pycocotools(str(truth_file), str(tmp_path / "reversed.json"))
    assert np.abs(other - stats).max() > 1e-3


def test_detections_come_by_image_id_and_then_as_the_network_gave_them(source, alone):
    network, (_, results, _) = alone
    expected = []
    for image_id in sorted(network.table):
        _, scores, classes = network.table[image_id]
        rows = zip(scores.tolist(), classes.tolist(), strict=True)
        expected += [(image_id, source.label_map.category_ids[c], score) for score, c in rows if c >= 0]
    assert [(r["image_id"], r["category_id"], r["score"]) for r in results] == expected
    assert len({r["image_id"] for r in results}) < source.size  # some have no detection


@pytest.mark.parametrize(
    ("count", "batch_size", "pipeline_type"),
    [
        *((1, 5, "dali_cpu"), (2, 2, "dali_cpu"), (3, 1, "dali_cpu"), (5, 2, "dali_cpu"), (8, 5, "dali_cpu")),
        *((3, 2, "tensorflow"), (8, 1, "tensorflow")),
    ],
)
def test_any_ranks_batches_and_readers_find_what_one_process_finds(
    source, alone, count, batch_size, pipeline_type
):
    network, expected = alone
    for found in on_ranks(count, lambda ranks: evaluate(source, ranks, batch_size, network, pipeline_type)):
        assert found == expected  # to the last bit, and in the same order


def test_rank_0_counts_with_the_backend_that_is_asked_for(source, alone, monkeypatch):
    network, expected = alone
    asked = []
    score = coco_metrics.score
    monkeypatch.setattr(
        coco_metrics, "score", lambda truth, found, backend: asked.append(backend) or score(truth, found)
    )
    for found in on_ranks(3, lambda ranks: evaluate(source, ranks, 2, network, coco_backend="faster")):
        assert found == expected
    assert asked == ["faster"]


def test_a_backend_that_rank_0_lacks_ends_all_ranks(source, alone, monkeypatch):
    monkeypatch.setattr(coco_metrics, "FASTER_VERSION", "0.0")
    outcomes = on_ranks(2, lambda ranks: evaluate(source, ranks, 2, alone[0], coco_backend="faster"))
    assert "pip install faster-coco-eval==0.0" in problem_of(outcomes, 0)


@pytest.mark.parametrize("count", [1, 5])
def test_images_without_annotations(drawn, drawn_source, count):
    files = sorted((drawn / "images").iterdir())
    network = Network(drawn_source)
    network.table = dict(enumerate(network.table.values()))  # image ids are positions in the list
    source = ImageListSource(tuple(map(str, files)))

    def work(ranks):
        loader = ShardLoader(source, 2, ranks.rank, ranks.world_size)
        options = {"title": "x", "explain": plain.explain, "ranks": ranks}
        return evaluation.predict(network, loader, drawn_source.label_map, **options)

    first, *others = on_ranks(count, work)
    assert len({r["image_id"] for r in first}) > 8
    assert all(other == first for other in others)


# --- problems reach everybody ---


def problem_of(outcomes, culprit):
    """The one line with which all ranks ended."""
    line = str(outcomes[culprit])
    assert isinstance(outcomes[culprit], UserError), line
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != culprit]
    assert all(isinstance(other, OtherRankError) for other in others), others
    assert {str(other) for other in others} == {f"rank {culprit}: {line}"}
    return line


@pytest.mark.parametrize("culprit", [0, 2])
def test_output_that_is_not_finite_ends_all_ranks(drawn_source, culprit):
    source = drawn_source
    network = Network(source)
    begin = source.size * culprit // 3
    image_id = int(source.annotations.image_ids[begin])
    network.table[image_id][0][3, 2] = np.nan
    outcomes = on_ranks(3, lambda ranks: evaluate(source, ranks, 2, network))
    line = problem_of(outcomes, culprit)
    assert line.startswith(f"the network's output for image {image_id} is not finite")
    with pytest.raises(UserError, match=f"^{line}$"):
        evaluate(source, Ranks(), 2, network)


def test_an_image_that_was_damaged_meanwhile_ends_all_ranks(drawn, tmp_path):
    shutil.copytree(drawn, tmp_path / "data")
    source = open_coco(str(tmp_path / "data" / "images"), str(tmp_path / "data" / "instances.json"))
    network = Network(source)
    file = tmp_path / "data" / "images" / source.annotations.file_names[10]
    file.write_bytes(b"no image")
    explain = datasets.explain
    outcomes = on_ranks(3, lambda ranks: evaluate(source, ranks, 1, network, explain=explain))
    assert file.name in problem_of(outcomes, 2)
    outcomes = on_ranks(3, lambda ranks: evaluate(source, ranks, 1, network))
    assert problem_of(outcomes, 2).startswith("the loader (dali_cpu) stopped: ")


def test_data_without_boxes_end_all_ranks(drawn):
    """Rank 0 alone finds out, when it counts."""
    source = open_coco(str(drawn / "images"), str(drawn / "instances.json"))
    network = Network(source)
    crowds = np.ones_like(source.annotations.is_crowd)
    source.__dict__["annotations"] = dataclasses.replace(source.annotations, is_crowd=crowds)
    line = problem_of(on_ranks(3, lambda ranks: evaluate(source, ranks, 4, network)), 0)
    assert "hold no box" in line


@pytest.mark.parametrize(
    ("shards", "num_shards", "images"), [((0, 0), 2, 12), ((1, 1), 2, 12), ((0, 0), 1, 24)]
)
def test_a_wrong_shard_is_our_mistake_and_found_on_all_ranks(drawn_source, shards, num_shards, images):
    network = Network(drawn_source)

    def work(ranks):
        loader = ShardLoader(drawn_source, 4, shards[ranks.rank], num_shards)
        options = {"title": "x", "explain": plain.explain, "ranks": ranks}
        return evaluation.predict(network, loader, drawn_source.label_map, **options)

    for outcome in on_ranks(2, work):
        assert isinstance(outcome, RuntimeError)
        evaluated = f"{images} images were evaluated, {12 // num_shards} different ones"
        assert f"{evaluated}, and the data have 12" in str(outcome)


# --- after every batch ---


def test_on_batch_is_called_alike_on_all_ranks_whatever_happens(drawn_source):
    """It may itself do what needs all ranks: so they agree that one of them was asked to stop."""
    network = Network(drawn_source)
    image_id = int(drawn_source.annotations.image_ids[0])
    network.table[image_id][0][0, 0] = np.inf
    steps = 4
    calls = {rank: [] for rank in range(3)}

    def work(ranks):
        def on_batch(done, total):
            calls[ranks.rank].append((done, total))
            assert ranks.gather(done) == [done] * 3

        return evaluate(drawn_source, ranks, 1, network, on_batch=on_batch)

    assert "not finite" in problem_of(on_ranks(3, work), 0)
    assert all(seen == [(i, steps) for i in range(1, steps + 1)] for seen in calls.values())


@pytest.mark.parametrize("count", [1, 3])
def test_what_on_batch_raises_passes_through(drawn_source, count):
    network = Network(drawn_source)

    class StopError(UserError):
        pass

    calls = []

    def on_batch(done, total):
        calls.append(done)
        if done == 2:
            raise StopError

    outcomes = on_ranks(count, lambda ranks: evaluate(drawn_source, ranks, 1, network, on_batch=on_batch))
    assert all(isinstance(outcome, StopError) for outcome in outcomes)
    assert sorted(calls) == [1] * count + [2] * count
