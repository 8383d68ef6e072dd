"""The batch of a skipped step and the weights that it met, in one file, to run the step again.

    python tools/replay_step.py runs/mine/skipped/step_00000123.npz

The file holds images, targets, weights and the metadata of the run. It is an .npz without pickled objects, so
opening one from an unknown source runs no code.
"""

import io
import json
import os
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from common import progress
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.files import write_bytes

KEPT = 2  # files in a run directory: the newest


class SkippedStep(NamedTuple):
    """What the file holds.

    Attributes:
        metadata: of the run's weights files, with "step" and "rank".
        images: (B, H, W, 3), as the loader gave them.
        targets: by name.
        weights: values of `model.variables`, in their order.
    """

    metadata: dict[str, Any]
    images: np.ndarray
    targets: dict[str, np.ndarray]
    weights: list[np.ndarray]


def save_batch(
    ranks: Ranks,
    directory: pathlib.Path | None,
    model: keras.Model,
    metadata: Mapping[str, Any],
    step: int,
    images: Any,
    targets: Any,
) -> str | None:
    """Writes the batch of the one rank that has images here; all ranks call it together.

    Args:
        ranks: of the run.
        directory: the run directory, on rank 0.
        model: with the weights that the batch met. (On a GPU a step is looked at one step late: if that one
            was taken, the weights are one update further.)
        metadata: that of the run's weights files (app, config, classes), with its precision and --freeze.
        step: its number.
        images, targets: of one replica in this step; None on ranks whose batch is not the one.

    Returns:
        The file, on rank 0; None elsewhere, and where it could not be written.
    """
    content = None
    if images is not None:
        content = _to_bytes(model, {**metadata, "step": step, "rank": ranks.rank}, images, targets)
    content = next((found for found in ranks.gather(content) if found is not None), None)
    if directory is None or content is None:
        return None
    path = directory / "skipped" / f"step_{step:08d}.npz"
    try:
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, content)
        for old in sorted(path.parent.glob("step_*.npz"))[:-KEPT]:
            old.unlink()
    except OSError as error:
        progress.log(f"warning: {path} cannot be written: {error.strerror}; training continues")
        return None
    return str(path)


def read_batch(path: str | os.PathLike) -> SkippedStep:
    """Reads a file of `save_batch`.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        if os.path.isfile(path) and not zipfile.is_zipfile(path):
            raise ValueError("it is damaged, or another kind of file")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        metadata = json.loads(str(arrays.pop("metadata")))
        found = SkippedStep(
            metadata,
            arrays.pop("images"),
            {name.removeprefix("target/"): a for name, a in arrays.items() if name.startswith("target/")},
            [arrays[name] for name in sorted(arrays) if name.startswith("weight/")],
        )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not the file of a skipped step: {error}") from error
    return found


def _to_bytes(
    model: keras.Model, metadata: Mapping[str, Any], images: tf.Tensor, targets: Mapping[str, tf.Tensor]
) -> bytes:
    arrays = {f"target/{name}": np.asarray(t) for name, t in targets.items()}
    arrays |= {
        f"weight/{i:05d}": tf.convert_to_tensor(v.value).numpy() for i, v in enumerate(model.variables)
    }
    stream = io.BytesIO()
    np.savez(stream, metadata=json.dumps(metadata), images=np.asarray(images), **arrays)
    return stream.getvalue()
