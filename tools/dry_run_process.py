"""One process of a dry run; dry_run.py starts them.

    horovodrun -np 2 python tools/dry_run_process.py SPEC.json

Trains under the flags in SPEC.json and writes what it observed to `rank_<rank>.json` beside it.
"""

import hashlib
import importlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np

from common import errors
from common.distributed.hooks import Hooks
from common.loader import BaseLoader
from common.training import checkpoint_files, weights
from common.training.optimizers import last_learning_rate
from common.training.run import Run


class Observer:
    """Notes what a run does, by its hooks.

    Attributes:
        run: the run, once it is started.
        steps: number of each step.
        image_ids: of each step's batch, by the number of epochs done.
        rates: learning rate of each step.
        evaluated: image ids of each evaluation.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.steps: list[int] = []
        self.image_ids: dict[int, list[int]] = {}
        self.rates: list[float] = []
        self.evaluated: list[list[int]] = []

    def on_start(self, run: Run) -> None:
        self.run = run

    def on_step(self, run: Run, images: Any, targets: Any) -> None:
        self.steps.append(run.state["step"])
        self.image_ids.setdefault(run.state["epoch"], []).extend(np.ravel(targets["image_ids"]).tolist())
        self.rates.append(last_learning_rate(run.optimizer))

    def wrap_eval_loader(self, loader: BaseLoader) -> "ObservedLoader":
        return ObservedLoader(loader, self.evaluated)


class ObservedLoader:
    """An evaluation loader that notes the image ids of each pass in `evaluated`."""

    def __init__(self, loader: BaseLoader, evaluated: list[list[int]]) -> None:
        self._loader, self._evaluated = loader, evaluated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def dataset(self) -> Iterator[Any]:
        """(images, extra), as the loader gives them."""
        self._evaluated.append([])
        for images, extra in self._loader.dataset():
            ids = [*self._evaluated[-1], *extra["image_ids"].numpy().tolist()]
            self._evaluated[-1] = sorted(set(ids))  # the last batch is padded with repeats
            yield images, extra


def main(spec_file: str) -> None:
    """Trains and writes what this rank observed."""
    spec = json.loads(pathlib.Path(spec_file).read_bytes())
    module = importlib.import_module(f"{spec['app']}.train")
    observer = Observer()
    hooks = Hooks(
        on_start=observer.on_start, on_step=observer.on_step, wrap_eval_loader=observer.wrap_eval_loader
    )
    a = module.Args(**spec["flags"])
    metrics = module.train(a, hooks)
    run = observer.run
    optimizer = getattr(run.optimizer, "inner_optimizer", run.optimizer)
    sha = hashlib.sha256()
    for variable in run.model.trainable_variables:
        sha.update(np.ascontiguousarray(variable).tobytes())
    record = {
        "rank": run.ranks.rank,
        "world_size": run.ranks.world_size,
        "versions": checkpoint_files.versions(),
        "steps": observer.steps,
        "image_ids": list(observer.image_ids.values()),
        "peak": float(optimizer._learning_rate.peak),
        "rates": observer.rates,
        "evaluated": observer.evaluated,
        "AP": metrics and metrics["AP"],
        "weights": sha.hexdigest(),
        "trainable_values": sum(int(np.prod(v.shape)) for v in run.model.trainable_variables),
    }
    if run.ranks.rank == 0:
        for name in (weights.LAST, *([weights.BEST] if metrics else [])):
            weights.load(run.model, pathlib.Path(a.output_dir, name))
    pathlib.Path(spec_file).with_name(f"rank_{run.ranks.rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    errors.run(main, positional=True)
