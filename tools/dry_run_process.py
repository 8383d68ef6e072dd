"""One of the processes of a rehearsal; dry_run.py starts them.

    horovodrun -np 2 python tools/dry_run_process.py SPEC.json

It calls the app's own `train`, listens, and leaves what it heard as files in the directory that SPEC names:
rank_0.json (RankFacts), or problem_0 (one line about what the user gave), or bug_0 (a traceback).
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import msgspec
import numpy as np
from nvidia import dali

from common import tf_readers
from common.datacheck.open_data import open_coco
from common.errors import OtherRankError, StoppedError, UserError
from common.shards import shard_range
from common.sources import Source
from common.training import checkpoint_files, step_guard, weights
from tools.dry_run_records import RankFacts


class Listener:
    """Stands between an app's `train` and three of its parts, which do their work as always.

    Args:
        module: the app's train.py.

    Attributes:
        batches: epoch (from 0) -> the image ids of each of its batches.
        first_step: number of the first step; None before it.
        rates: see RankFacts.
        evaluated: see RankFacts.
        parts: what `train` gave to its Checkpoints: ranks, model, optimizer, ...
    """

    def __init__(self, module: Any) -> None:
        self.batches: dict[int, list[list[int]]] = {}
        self.first_step: int | None = None
        self.rates: list[tuple[int, float]] = []
        self.evaluated: list[list[int]] = []
        self.parts: dict[str, Any] = {}
        self._evaluate, module.evaluate = module.evaluate, self._on_evaluate
        self._checkpoints, module.Checkpoints = module.Checkpoints, self._on_checkpoints
        listener = self

        class Guard(step_guard.StepGuard):
            def check(self, step: int, result: Any, images: Any, targets: Any) -> None:
                listener._on_step(step, targets)
                super().check(step, result, images, targets)

        step_guard.StepGuard = Guard

    def _on_checkpoints(self, *arguments: Any, **parts: Any) -> Any:
        self.parts = parts
        self._saved = self._checkpoints(*arguments, **parts)
        return self._saved

    def _on_step(self, step: int, targets: dict[str, Any]) -> None:
        if self.first_step is None:
            self.first_step = step
        ids = [int(image_id) for image_id in np.ravel(targets["image_ids"])]
        self.batches.setdefault(self._saved.state["epoch"], []).append(ids)
        optimizer = self.parts["optimizer"]
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        # `iterations` counts updates; what the schedule is asked with are batches.
        counter = next(variable for variable in optimizer.variables if variable.name == "iteration")
        self.rates.append((int(counter), float(optimizer.learning_rate)))

    def _on_evaluate(self, detect: Any, loader: Any, *arguments: Any, **named: Any) -> Any:
        seen: set[int] = set()
        result = self._evaluate(detect, _Heard(loader, seen), *arguments, **named)
        self.evaluated.append(sorted(seen))
        return result


class _Heard:
    """An evaluation loader whose image ids are noted."""

    def __init__(self, loader: Any, seen: set[int]) -> None:
        self._loader = loader
        self._seen = seen
        self.pipeline_type = loader.pipeline_type
        self.steps_per_epoch = loader.steps_per_epoch

    def dataset(self) -> Iterator[Any]:
        for images, extra in self._loader.dataset():
            self._seen.update(extra["image_ids"].numpy().tolist())
            yield images, extra


def work(spec_file: str) -> int:
    """One process: trains, and writes RankFacts, or what went wrong. The exit code."""
    spec = json.loads(pathlib.Path(spec_file).read_bytes())
    facts = pathlib.Path(spec["facts"])
    rank = os.environ.get("HOROVOD_RANK", "0")
    (facts / f"pid_{rank}").write_text(str(os.getpid()))
    try:
        heard = _train(spec["app"], spec["flags"])
    except OtherRankError:
        return 1
    except (UserError, StoppedError) as problem:
        (facts / f"problem_{rank}").write_text(str(problem))
        return 1
    except Exception:  # whatever it is, the parent shows it
        (facts / f"bug_{rank}").write_text(traceback.format_exc())
        return 1
    (facts / f"rank_{heard.rank}.json").write_bytes(msgspec.json.encode(heard))
    return 0


def _train(app: str, flags: dict[str, Any]) -> RankFacts:
    module = importlib.import_module(f"{app}.train")
    listener = Listener(module)
    metrics = module.train(**flags)
    ranks, model = listener.parts["ranks"], listener.parts["model"]
    source = None
    if flags["pipeline_type"] != "synthetic":
        source = open_coco(flags["train_images"], flags["train_annotations"])
    trained = model.trainable_variables
    digest = _digest([np.asarray(variable) for variable in trained])
    loaded = {}
    if ranks.rank == 0:
        for name in (weights.LAST, *([weights.BEST] if metrics else [])):
            try:
                weights.load(model, pathlib.Path(flags["output_dir"], name))
                loaded[name] = ""
            except UserError as problem:
                loaded[name] = str(problem)
    return RankFacts(
        rank=ranks.rank,
        world_size=ranks.world_size,
        versions=checkpoint_files.versions() | _horovod_version(),
        fingerprint=source.fingerprint if source else "synthetic",
        steps=[len(batches) for batches in listener.batches.values()],
        first_step=listener.first_step,
        trained_ids=[list(itertools.chain(*batches)) for batches in listener.batches.values()],
        shard_ids=_read_shard(source, ranks, flags) if source else [],
        rates=listener.rates,
        weights=digest,
        trainable_values=sum(int(np.prod(variable.shape)) for variable in trained),
        evaluated=listener.evaluated,
        ap=metrics and metrics["AP"],
        loaded=loaded,
    )


def _horovod_version() -> dict[str, str]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {"horovod": importlib.metadata.version("horovod")}
    return {}


def _read_shard(source: Source, ranks: Any, flags: dict[str, Any]) -> list[int]:
    """The image ids of this rank's part of the first epoch, by the training reader alone."""
    begin, end = shard_range(source.size, ranks.rank, ranks.world_size)
    place = {"shard_id": ranks.rank, "num_shards": ranks.world_size, "training": True, "seed": flags["seed"]}
    if flags["pipeline_type"] == "tensorflow":
        return [
            int(example["image_id"]) for example in tf_readers.examples(source, **place).take(end - begin)
        ]
    pipeline = dali.Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        *_, image_ids = source.read(**place)
        pipeline.set_outputs(image_ids)
    pipeline.build()
    return [int(pipeline.run()[0].as_array().item()) for _ in range(begin, end)]


def _digest(arrays: Sequence[np.ndarray]) -> str:
    """SHA-256 (hex) of the arrays' bytes."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    sys.exit(work(sys.argv[1]))
