"""Chooses flags and data for the small run of `--dry_run`, and runs one process of the small run.

    horovodrun -np 2 python tools/dry_run_process.py SPEC.json

The command trains with the flags in SPEC.json and writes the record `rank_<rank>.json` next to SPEC.json.
"""

import hashlib
import importlib
import io
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from common.progress import import_tensorflow

if __name__ == "__main__":
    import_tensorflow()

import numpy as np
import PIL.Image

from common import errors
from common.args import Args
from common.data.sources import Source
from common.distributed.ranks import Hooks
from tools.conversion.coco_writer import write_coco

if TYPE_CHECKING:
    from common.training.run import Run

IMAGES_PER_PROCESS = 4  # plus one, for shards of different sizes
SIDE = 128  # pixels of the shorter side of the network input
STRIDE = 32  # of the sides of the network input
MAX_BATCH = 2
MAX_STEPS = 3


def small_image_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """Scales (height, width) down to a shorter side of SIDE pixels. Keeps about the same aspect ratio.

    >>> small_image_size((512, 512)), small_image_size((384, 640)), small_image_size((64, 96))
    ((128, 128), (128, 224), (64, 96))
    """
    scale = SIDE / min(image_size)
    if scale >= 1:
        return image_size
    height, width = (max(round(side * scale / STRIDE), 1) * STRIDE for side in image_size)
    return height, width


def small_flags(a: Args, config: Any, processes: int, size: int) -> dict[str, Any]:
    """Returns the flags that the small run changes, without those of the data."""
    batch = min(a.batch_size, MAX_BATCH)
    images = min(size, IMAGES_PER_PROCESS * processes + 1)
    height, width = small_image_size(config.image_size)
    small: dict[str, Any] = {
        "dry_run": None,
        "image_size": f"{height}x{width}",
        "batch_size": batch,
        "steps_per_epoch": max(min(images // (processes * batch), MAX_STEPS), 1),
        "accumulate_steps": min(a.accumulate_steps, 2),
        "eval_every": 1,
        "eval_every_steps": 0,
        "patience": 0,
        "save_every": 1,
        "num_threads": 1,
        "prefetch": 1,
        "pipeline_type": a.pipeline_type if a.pipeline_type in ("tensorflow", "synthetic") else "dali_cpu",
        "overwrite": False,
        "step_timeout": 600.0,  # the first step compiles, and the processes share the CPUs
        "elastic": False,
        # A single process runs without Horovod, because Horovod may not be installed.
        "strategy": "horovod" if processes > 1 else "none",
        "compression": a.compression if processes > 1 else "none",
    }
    if getattr(config, "close_mosaic", 0):
        small["close_mosaic"] = 1
    return small


def small_data(directory: pathlib.Path, split: str, source: Source, processes: int) -> dict[str, Any]:
    annotations = source.annotations
    empty = np.diff(annotations.target_boxes.row_splits) == 0
    rows = np.sort(np.argsort(empty, kind="stable")[: IMAGES_PER_PROCESS * processes + 1])
    images = directory / "images"
    images.mkdir(parents=True)
    names = []
    for row in rows.tolist():
        encoded = source.encoded(row)
        names.append(f"{row}.{PIL.Image.open(io.BytesIO(encoded)).format}".lower())
        (images / names[-1]).write_bytes(encoded)
    selected = annotations.select(np.isin(np.arange(source.size), rows))
    selected.file_names[:] = names
    write_coco(selected, directory / "instances.json")
    return {
        "input_type": "coco",
        f"{split}_images": str(images),
        f"{split}_annotations": str(directory / "instances.json"),
        f"{split}_file_pattern": None,
    }


def main(spec_file: str) -> None:
    spec = json.loads(pathlib.Path(spec_file).read_bytes())
    train = importlib.import_module(spec["module"])
    runs: list[Run] = []
    steps: list[int] = []
    image_ids: list[int] = []  # of the images trained on in the first epoch

    def on_step(run: "Run", images: Any, targets: Any) -> None:
        runs.append(run)
        steps.append(run.state["step"])
        if run.state["epoch"] == 0:
            image_ids.extend(np.ravel(targets["image_ids"]).tolist())

    metrics = train.train(train.Args(**spec["flags"]), Hooks(on_step=on_step))
    model, rank = runs[0].model, runs[0].ranks.rank
    optimizer = getattr(runs[0].optimizer, "inner_optimizer", runs[0].optimizer)
    trained = b"".join(np.asarray(variable).tobytes() for variable in model.trainable_variables)
    record = {
        "steps": steps,
        "image_ids": image_ids,
        "peak": float(optimizer._learning_rate.peak),
        "AP": metrics and metrics["AP"],
        "weights": hashlib.sha256(trained).hexdigest(),
        "trainable_values": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
    }
    pathlib.Path(spec_file).with_name(f"rank_{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    errors.run(main, positional=True)
