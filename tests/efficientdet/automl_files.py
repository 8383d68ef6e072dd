"""Writes files in the formats of google/automl.

automl_d0_names.txt and automl_d0_outputs.txt list variables and outputs of automl's own Keras model
(tf2/efficientdet_keras.py, tf_keras 2.21). `variable_values` computes the values of this model's weights.
"""

import dataclasses
import pathlib
import zlib

import h5py
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from efficientdet.config import get_config

HERE = pathlib.Path(__file__).parent
# A d0 with one pyramid cell and one convolution in each head.
SMALL_D0 = dataclasses.replace(
    get_config("efficientdet-d0"), fpn_cells=1, head_repeats=1, image_size=(72, 104)
)


def read_table(name):
    """Returns the words of each line of a text file, without comments."""
    return [line.split() for line in (HERE / name).read_text().splitlines() if not line.startswith("#")]


def parse_shape(text):
    """Converts "3x3x32" to (3, 3, 32), and "" to ()."""
    return tuple(int(side) for side in text.split("x") if side)


SHAPES = {
    f"{layer}/{variable}": parse_shape(shape)
    for layer, *variables in read_table("automl_d0_names.txt")
    for variable, _, shape in (item.partition("=") for item in variables)
}


def variable_values(name, shape):
    """Returns pseudorandom values; the name is their seed."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    kind = name.rpartition("/")[2]
    if kind == "gamma" or kind.startswith("WSM"):
        values = random.uniform(0.5, 1.5, shape)
    elif kind == "moving_variance":
        values = random.uniform(0.5, 2, shape)
    elif kind in ("beta", "moving_mean", "bias"):
        values = random.normal(0, 0.3, shape)
    else:
        inputs = np.prod(shape[:2]) * (1 if kind == "depthwise_kernel" else shape[2])
        values = random.normal(size=shape) * np.sqrt(1.6 / inputs)
    return np.float32(values)


def weight_values(model):
    """Returns {path: values} of the model's weights now."""
    return {weight.path: np.array(weight) for weight in model.weights}


def write_h5(path, variables):
    """Writes an HDF5 file as Keras 2 does: a group for each layer, and names that end in `:0`."""
    with h5py.File(path, "w") as file:
        for name, values in variables.items():
            file[f"{name.split('/')[0]}/{name}:0"] = values
    return path


def write_tensors(prefix, tensors):
    """Writes a checkpoint in the format of tf.compat.v1.train.Saver."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    saved = {"tensor_names": list(tensors), "tensors": list(map(tf.constant, tensors.values()))}
    tf.raw_ops.SaveV2(prefix=str(prefix), shape_and_slices=[""] * len(tensors), **saved)
    return prefix


def write_objects(prefix, variables, missing=None):
    """Writes a checkpoint in the format of tf.train.Checkpoint, with a moving average of each variable.

    Args:
        missing: what the last variable's average lacks. "values": values. "attribute": values and attribute
            in the object graph. None: nothing.
    """
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    root, tensors = graph.nodes.add(), {}
    for count, (name, values) in enumerate(variables.items()):
        key = f"net/parts/{count}/value/.ATTRIBUTES/VARIABLE_VALUE"
        slot_key = key.replace("/.ATTRIBUTES", "/.OPTIMIZER_SLOT/optimizer/average/.ATTRIBUTES")
        is_incomplete = missing and count == len(variables) - 1
        tensors |= {key: values + 1} if is_incomplete else {key: values + 1, slot_key: values}
        variable, slot, slot_name = graph.nodes.add(), graph.nodes.add(), f"Averaging/{name}/average"
        variable.attributes.add(name="VARIABLE_VALUE", full_name=name, checkpoint_key=key)
        if not is_incomplete or missing == "values":
            slot.attributes.add(name="VARIABLE_VALUE", full_name=slot_name, checkpoint_key=slot_key)
        ids = {"original_variable_node_id": 2 * count + 1, "slot_variable_node_id": 2 * count + 2}
        root.slot_variables.add(slot_name="average", **ids)
    tensors["_CHECKPOINTABLE_OBJECT_GRAPH"] = graph.SerializeToString()
    return write_tensors(prefix, tensors)
