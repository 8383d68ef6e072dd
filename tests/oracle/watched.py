"""Runs a loader's pipeline, and returns its image ids and random numbers.

While the graph is defined, this module records outputs of random operators and adds them to the graph's
outputs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from nvidia import dali
from nvidia.dali import fn

from common.data.coco import CocoSource
from tests.oracle.fuzzed import Annotated, FuzzedSet

BATCH = 25
# (owner of an operator, its name, slice of its outputs)
_OPERATORS = [
    (fn.random, "uniform", slice(1)),
    (fn.random, "coin_flip", slice(1)),
    (fn, "batch_permutation", slice(1)),
    (fn, "random_bbox_crop", slice(2)),
    (CocoSource, "read", slice(-1, None)),
]


class Draws:
    """The random numbers of one batch. A test must take them in the order of the graph."""

    def __init__(self, draws: list[tuple[str, dict[str, Any], list[np.ndarray]]]) -> None:
        self._draws = list(draws)  # (operator, options, values) of each output

    def take(self, operator: str, **options: Any) -> Any:
        """Returns (B, ...). The operator and its options must be these."""
        name, all_options, values = self._draws.pop(0)
        assert (name, {key: all_options.get(key) for key in options}) == (operator, options)
        return values[0] if len(values) == 1 else values

    def uniform(self, low: float, high: float, **options: Any) -> Any:
        """If low equals high, the graph draws no number."""
        return self.take("uniform", range=(low, high), **options) if low < high else np.float32(low)

    def coin(self, probability: float) -> np.ndarray:
        return self.take("coin_flip", probability=probability)

    def finish(self) -> None:
        """Asserts that the test has taken all numbers."""
        assert not self._draws


class Batch(NamedTuple):
    outputs: dict[str, np.ndarray]
    image_ids: list[int]
    draws: Draws
    other_image_ids: list[list[int]]


class Watched:
    """The loader's pipeline must not be built yet."""

    def __init__(self, loader: Any) -> None:
        self._names = list(loader.element_spec)
        self._records = []
        set_outputs = dali.Pipeline.set_outputs

        def set_all_outputs(pipeline, *nodes):
            set_outputs(pipeline, *nodes, *(node for *_, recorded in self._records for node in recorded))

        with pytest.MonkeyPatch.context() as patch:
            for owner, name, which in _OPERATORS:
                patch.setattr(owner, name, self._recorded(getattr(owner, name), name, which))
            patch.setattr(dali.Pipeline, "set_outputs", set_all_outputs)
            self._pipeline = loader.pipeline

    def _recorded(self, operator, name, which):
        def call(*inputs, **options):
            result = operator(*inputs, **options)
            nodes = result if isinstance(result, list | tuple) else [result]
            self._records.append((name, options, nodes[which]))
            return result

        return call

    def run(self) -> Batch:
        values = [np.asarray(output.as_tensor()) for output in self._pipeline.run()]
        outputs, rest = dict(zip(self._names, values, strict=False)), iter(values[len(self._names) :])
        records = [(name, options, [next(rest) for _ in nodes]) for name, options, nodes in self._records]
        image_ids = [ids.reshape(-1).tolist() for name, _, (ids, *_) in records if name == "read"]
        draws = Draws([record for record in records if record[0] != "read"])
        return Batch(outputs, image_ids[0], draws, image_ids[1:])


def run_epoch(make: type, fuzzed: FuzzedSet, **options: Any) -> Iterator[tuple[Batch, list[Annotated]]]:
    """Yields (batch, its images) for each batch of one epoch. `options` are passed to `make`."""
    loader = make(source=fuzzed.source, batch_size=BATCH, count_lost=True, seed=7, **options)
    watched, seen = Watched(loader), []
    for _ in range(loader.steps_per_epoch):
        batch = watched.run()
        images = [fuzzed.images[image_id] for image_id in batch.image_ids]
        if not loader.training:
            batch.draws.finish()
            np.testing.assert_array_equal(batch.outputs["image_ids"].reshape(-1), batch.image_ids)
            np.testing.assert_array_equal(batch.outputs["image_sizes"], [image.size for image in images])
        yield batch, images
        seen += batch.image_ids
    assert (sorted(seen) if loader.training else seen) == list(fuzzed.images)
