"""Run by test_evaluation_horovod.py under horovodrun: both apps evaluate with random weights.

    horovodrun -np 2 python tests/distributed/evaluate_on_ranks.py DATA OUTPUT_DIR

Each rank writes what it has in the end to OUTPUT_DIR/<rank>.msgpack: an Outcome, as a tuple, by name.
"""

import dataclasses
import pathlib
import sys
import types
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import efficientdet.config
import efficientdet.loaders
import efficientdet.model
import efficientdet.predict
import yolov4.config
import yolov4.loaders
import yolov4.model
import yolov4.predict
from common import progress
from common.datacheck.datasets import explain, open_coco
from common.distributed import ranks as distributed
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.evaluation import evaluate
from tests.distributed import exchange

# Package, a tiny network, and the noise on its weights with which scores spread from 0 to 1.
APPS: dict[str, tuple[types.ModuleType, dict[str, Any], float]] = {
    "efficientdet": (efficientdet, {"fpn_cells": 1, "head_repeats": 1, "max_level": 5}, 0.16),
    "yolov4": (yolov4, {"width": 0.25}, 0.1),
}
BATCH_SIZE = 5  # of two ranks: twelve images, so each repeats four


class Outcome(NamedTuple):
    """Attributes:
    metrics: as common.evaluation.evaluate.evaluate returns them; None where it raised.
    results: the same.
    found: image id -> (boxes, scores, classes) of one image of this rank, as the network gave them.
    problem: the line of the UserError.
    """

    metrics: dict[str, Any] | None
    results: list[dict[str, Any]] | None
    found: dict[int, tuple[np.ndarray, ...]]
    problem: str | None


class Evaluation:
    """One app with weights that find something, the same on every rank."""

    def __init__(self, name: str, data: str) -> None:
        self.app, tiny, noise = APPS[name]
        config = self.app.config.get_config(f"{name}-nano")
        self.config = dataclasses.replace(config, image_size=(64, 96), **tiny)
        self.source = open_coco(f"{data}/images", f"{data}/instances.json")
        keras.utils.set_random_seed(1)
        self.model = self.app.model.build_model(self.config.model_name, num_classes=3, config=self.config)
        random = np.random.default_rng(2)
        for weight in self.model.trainable_weights:
            weight.assign(weight + random.normal(0, noise, weight.shape))
        self.detect = self.app.predict.make_detect(self.model, self.config)

    def run(self, ranks: Ranks, batch_size: int, *, broken: bool = False) -> Outcome:
        """Evaluates; `broken` makes this rank's second batch infinite."""
        loader = self.app.loaders.make_loader(
            "dali_cpu",
            source=self.source,
            config=self.config,
            batch_size=batch_size,
            training=False,
            shard_id=ranks.rank,
            num_shards=ranks.world_size,
            with_targets=False,
        )
        pending, found = [], {}

        def detect(images: tf.Tensor, letterbox: tf.Tensor) -> tuple[tf.Tensor, ...]:
            boxes, scores, classes, finite = self.detect(images, letterbox)
            pending.append((boxes.numpy(), scores.numpy(), classes.numpy()))
            return boxes, scores, classes, finite & (not (broken and len(pending) == 2))

        try:
            options = {"ranks": ranks, "explain": explain}
            metrics, results, _ = evaluate.evaluate(detect, loader, self.source.label_map, **options)
        except UserError as error:
            return Outcome(None, None, {}, str(error))
        for (_, extra), arrays in zip(loader.dataset(), pending, strict=False):
            for image_id, *image in zip(extra["image_ids"].numpy().tolist(), *arrays, strict=True):
                found.setdefault(image_id, tuple(image))
        return Outcome(metrics, results, found, None)


def main(data: str, output_dir: str) -> None:
    ranks = distributed.start("horovod")
    progress.be_quiet(ranks.rank > 0)
    outcomes = {}
    for name in APPS:
        app = Evaluation(name, data)
        outcomes[name] = app.run(ranks, BATCH_SIZE)
        outcomes[f"{name}, rank 1 broken"] = app.run(ranks, 2, broken=ranks.rank == 1)
    exchange.write(pathlib.Path(output_dir, f"{ranks.rank}.msgpack"), outcomes)
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
