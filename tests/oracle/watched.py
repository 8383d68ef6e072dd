"""A loader's own DALI pipeline, whose batches also tell which images they are of and what was drawn for them.

Nothing of the pipeline is replaced: while its graph is defined, what the random operators return is noted,
and becomes further outputs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from nvidia import dali
from nvidia.dali import fn

from common.datasets import CocoSource
from tests.oracle.fuzzed import Annotated, FuzzedSet

# Where each random operator lives, its name, and how many of its outputs are what it has drawn.
_OPERATORS = [
    (fn.random, "uniform", 1),
    (fn.random, "coin_flip", 1),
    (fn, "batch_permutation", 1),
    (fn, "random_bbox_crop", 2),
]


class Draw(NamedTuple):
    """What one operator of the graph drew for a batch."""

    operator: str
    options: dict[str, Any]
    values: list[np.ndarray]  # of each output, (B, ...)


class Draws:
    """The draws of a batch, to be taken in the order in which the graph defines them."""

    def __init__(self, draws: list[Draw]) -> None:
        self._draws = list(draws)

    def take(self, operator: str, **options: Any) -> Any:
        """The values of the next draw, (B, ...), which must be by this operator with these options."""
        assert self._draws, f"no draw is left for {operator} {options}"
        draw = self._draws.pop(0)
        given = {name: draw.options.get(name) for name in options}
        assert (draw.operator, given) == (operator, options)
        return draw.values[0] if len(draw.values) == 1 else draw.values

    def uniform(self, low: float, high: float, **options: Any) -> Any:
        """Numbers drawn from low .. high; where these are equal nothing is drawn."""
        return self.take("uniform", range=(low, high), **options) if low < high else np.float32(low)

    def coin(self, probability: float) -> np.ndarray:
        return self.take("coin_flip", probability=probability)

    def finish(self) -> None:
        """Nothing else was drawn."""
        assert not self._draws


class Batch(NamedTuple):
    """One batch, and where it comes from."""

    outputs: dict[str, np.ndarray]
    image_ids: list[int]  # in the order in which they were read
    draws: Draws
    other_image_ids: list[list[int]]  # of each further reader


class Watched:
    """The pipeline of an EfficientDetPipeline or YOLOv4Pipeline on the CPU, not yet built."""

    def __init__(self, loader: Any) -> None:
        self._names = list(loader.element_spec)
        self._image_ids = []  # of each reader
        self._drawn = []  # (operator, options, nodes)
        read, set_outputs = CocoSource.read, dali.Pipeline.set_outputs

        def read_watched(source, **options):
            nodes = read(source, **options)
            self._image_ids.append(nodes[-1])
            return nodes

        def set_all_outputs(pipeline, *nodes):
            drawn = [node for *_, outputs in self._drawn for node in outputs]
            set_outputs(pipeline, *nodes, *self._image_ids, *drawn)

        with pytest.MonkeyPatch.context() as patch:
            for module, name, count in _OPERATORS:
                patch.setattr(module, name, self._noting(getattr(module, name), name, count))
            patch.setattr(CocoSource, "read", read_watched)
            patch.setattr(dali.Pipeline, "set_outputs", set_all_outputs)
            self._pipeline = loader.pipeline

    def _noting(self, operator, name, count):
        def call(*inputs, **options):
            result = operator(*inputs, **options)
            outputs = list(result)[:count] if isinstance(result, list | tuple) else [result]
            self._drawn.append((name, options, outputs))
            return result

        return call

    def run(self) -> Batch:
        values = [np.asarray(output.as_tensor()) for output in self._pipeline.run()]
        outputs = dict(zip(self._names, values, strict=False))
        rest = values[len(self._names) :]
        image_ids, rest = rest[: len(self._image_ids)], rest[len(self._image_ids) :]
        first, *others = [ids.reshape(-1).tolist() for ids in image_ids]
        draws = []
        for name, options, nodes in self._drawn:
            draws.append(Draw(name, options, rest[: len(nodes)]))
            rest = rest[len(nodes) :]
        return Batch(outputs, first, Draws(draws), others)


def run_epoch(loader: Any, fuzzed: FuzzedSet) -> Iterator[tuple[Batch, list[Annotated]]]:
    """The batches of one epoch with their images; each image comes once, in evaluation in order."""
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
