"""Reads weights of other projects from TensorFlow checkpoints and from Keras 2's .h5 files.

Variables are identified by names, for example `efficientnet-b0/stem/conv2d/kernel`. Four layouts are read:

- a checkpoint of TensorFlow 1's Saver contains these names;
- a checkpoint of tf.train.Checkpoint has them in its object graph (trackable_object_graph.proto, full_name);
- a .h5 file of Keras' save_weights has a group for each layer. The names in it end in `:0`;
- a .h5 file of Keras' model.save has all these groups in a group `model_weights`.

If a variable has a moving average, the average is read instead.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import trackable_object_graph_pb2

from common.errors import UserError
from common.weights import weight_files

_AVERAGE = "/ExponentialMovingAverage"  # tf.train.ExponentialMovingAverage
_AVERAGE_SLOT = "average"  # tensorflow_addons' MovingAverage, which automl's Keras training uses
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
# Errors of h5py, TensorFlow's reader and protobuf for damaged files.
_DAMAGED = (tf.errors.OpError, DecodeError, OSError, RuntimeError, LookupError, ValueError, TypeError)


class ForeignWeights(NamedTuple):
    """The variables in a file or checkpoint of another project.

    Attributes:
        shapes: name of a variable -> its shape.
        stored: name of a variable -> key of the array to read. If there is a moving average, this is the key
            of the average.
        read: function that takes several keys and returns their arrays in the same order. It raises
            UserError if the file is damaged.
    """

    path: str
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, str]
    read: Callable[[Iterable[str]], list[np.ndarray]]

    def renamed(self, rename: Callable[[str], str | None]) -> "ForeignWeights":
        """Renames the variables. Variables whose new name is None are left out."""
        names = {name: rename(name) for name in self.shapes}
        return self._replace(
            shapes={new: self.shapes[name] for name, new in names.items() if new},
            stored={new: self.stored[name] for name, new in names.items() if new},
        )


def open_weights(path: str | os.PathLike) -> ForeignWeights:
    """Opens a .h5 file or a checkpoint.

    Args:
        path: a .h5 file, the prefix of a checkpoint, one file of a checkpoint, or a directory with one
            checkpoint.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = os.fspath(path)
    if pathlib.Path(path).is_file() and h5py.is_hdf5(path):
        return _open_h5(path)
    prefix = _find_prefix(pathlib.Path(path))
    if prefix:
        return _open_checkpoint(path, prefix)
    if not pathlib.Path(path).exists():
        raise UserError(f"weights {path}: no such file, run directory or checkpoint")
    raise UserError(
        f"weights {path} cannot be read: give a run directory of this project, an undamaged "
        ".h5 file, or one checkpoint (its prefix or its directory)"
    )


def take(
    file: ForeignWeights,
    model: keras.Model,
    names_of: Mapping[str, tuple[str, ...]],
    lengths: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Reads the values of the weights in `names_of`. Returns path of a weight -> float32 array.

    Args:
        names_of: path of a weight -> names of its variables in the file. Arrays of several names are stacked.
        lengths: path of a weight -> length of its last axis in the file, if the model has another length.

    Raises:
        UserError: the file is damaged or belongs to another model: a variable is missing, or a shape differs.
    """
    weights = [weight for weight in model.weights if weight.path in names_of]
    problem = f"weights {file.path} do not fit {model.name}"
    for weight in weights:
        names = names_of[weight.path]
        for name in names:
            if name not in file.shapes:
                raise UserError(f"{problem}: {name} is not in the file")
        shape = file.shapes[names[0]] if len(names) == 1 else (len(names), *file.shapes[names[0]])
        expected = (*weight.shape[:-1], lengths.get(weight.path, weight.shape[-1]))
        if shape != expected:
            raise UserError(f"{problem}: {names[0]} is {shape} in the file and {expected} in the model")
    arrays = iter(file.read(file.stored[name] for weight in weights for name in names_of[weight.path]))
    values = {}
    for weight in weights:
        parts = [np.asarray(next(arrays), np.float32) for _ in names_of[weight.path]]
        values[weight.path] = parts[0] if len(parts) == 1 else np.stack(parts)
        _check_numbers(file.path, names_of[weight.path][0], values[weight.path])
    return values


def _check_numbers(path: str, name: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise UserError(f"weights {path}: {name} is not finite, so the file is damaged")
    if name.endswith(("/moving_variance", ".running_var")) and values.min() < 0:
        raise UserError(f"weights {path}: {name} is negative, so the file is damaged")


@contextlib.contextmanager
def _in_one_line(path: str, problem: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise UserError(f"weights {path}: {problem} ({weight_files.reason(error)})") from error


def _open_h5(path: str) -> ForeignWeights:
    def read(keys: Iterable[str]) -> list[np.ndarray]:
        with _in_one_line(path, "the file is damaged"), h5py.File(path) as file:
            return [file[key][()] for key in keys]

    shapes, stored = {}, {}

    def note(key: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            name = key.removeprefix("model_weights/").partition("/")[2].removesuffix(":0")
            shapes[name], stored[name] = tuple(item.shape), key

    with _in_one_line(path, "the file is damaged"), h5py.File(path) as file:
        file.visititems(note)
    return ForeignWeights(path, shapes, stored, read)


def _find_prefix(path: pathlib.Path) -> str | None:
    if path.is_dir():
        latest = tf.train.latest_checkpoint(path)
        if latest:
            return latest
        indexes = sorted(path.glob("*.index"))
        return str(indexes[0].with_suffix("")) if len(indexes) == 1 else None
    for prefix in (path, path.with_suffix("")):
        if prefix.name and pathlib.Path(f"{prefix}.index").is_file():
            return str(prefix)
    return None


def _open_checkpoint(path: str, prefix: str) -> ForeignWeights:
    def read(keys: Iterable[str]) -> list[Any]:  # arrays, or bytes of the object graph
        with _in_one_line(path, "the checkpoint is incomplete"):
            return [reader.get_tensor(key) for key in keys]

    with _in_one_line(path, "the checkpoint is damaged"):
        reader = tf.train.load_checkpoint(prefix)
        by_key = reader.get_variable_to_shape_map()
    if _GRAPH in by_key:
        raw, averages = _names_of_objects(path, *read([_GRAPH]))
    else:
        raw = {key: key for key in by_key if not key.endswith(_AVERAGE)}
        averages = {key.removesuffix(_AVERAGE): key for key in by_key if key.endswith(_AVERAGE)}
    for name, key in averages.items():
        if key not in by_key:
            raise UserError(f"weights {path}: the checkpoint is incomplete. It lacks the average of {name}")
    stored = {name: key for name, key in (raw | averages).items() if key in by_key}
    shapes = {name: tuple(by_key[key]) for name, key in stored.items()}
    return ForeignWeights(path, shapes, stored, read)


def _names_of_objects(path: str, graph: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Returns two dicts: name of a variable -> key of its values; name -> key of its moving average."""
    with _in_one_line(path, "the checkpoint is damaged"):
        nodes = trackable_object_graph_pb2.TrackableObjectGraph.FromString(graph).nodes
    keys = [{a.full_name: a.checkpoint_key for a in node.attributes if a.full_name} for node in nodes]
    raw = {name: key for of_node in keys for name, key in of_node.items()}
    averages: dict[str, str] = {}
    for node in nodes:
        for slot in node.slot_variables:
            if slot.slot_name != _AVERAGE_SLOT:
                continue
            values = next(iter(keys[slot.slot_variable_node_id].values()), "")
            averages |= dict.fromkeys(keys[slot.original_variable_node_id], values)
    return raw, averages
