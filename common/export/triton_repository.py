"""Writes a model repository for NVIDIA's Triton Inference Server.

    preprocess/  DALI: the bytes of image files -> pixels for the network, and sizes of the originals
    detector/    ONNX Runtime or TensorRT: pixels and sizes -> boxes, scores, classes, count
    detect/      an ensemble of both
    labels.txt, client.py, README.md

https://github.com/triton-inference-server/server (docs/user_guide) describes the format, and
https://github.com/triton-inference-server/dali_backend what DALI expects. Tests run the repository on a
Triton server with stand-ins for the backends of DALI and ONNX Runtime. NVIDIA's container has never
run it.
"""

import json
import pathlib
import re
import string
from collections.abc import Callable
from typing import Any, NamedTuple

from common.data.labels import LabelMap

CONTAINER = "nvcr.io/nvidia/tritonserver:26.04-py3"  # dali_backend, docker/Dockerfile.release at 2026-06-30
MAX_BATCH_SIZE = 16  # the largest batch of engines that tensorrt.py builds
ENSEMBLE = "detect"
MODEL = pathlib.PurePath("detector", "1", "model")  # without the suffix


class Placement(NamedTuple):
    """Where preprocessing places an image in the network input.

    Attributes:
        keep_aspect: whether the image keeps its aspect ratio; otherwise it is stretched.
        centered: whether it is in the centre; otherwise at the top left.
        antialias: whether resizing averages over all pixels.
    """

    keep_aspect: bool
    centered: bool
    antialias: bool


_PREPROCESS = """\
name: "preprocess"
backend: "dali"
max_batch_size: $max_batch_size
version_policy { latest { num_versions: 1 } }
# Each instance works on one request. With dynamic_batching, a damaged image would fail the requests of
# other clients: DALI fails for its whole batch.
instance_group [ { kind: KIND_AUTO count: 2 } ]
input [ { name: "image" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [
  { name: "images" data_type: TYPE_UINT8 dims: [ $height, $width, 3 ] },
  { name: "image_sizes" data_type: TYPE_INT32 dims: [ 2 ] }
]
parameters [ { key: "num_threads" value { string_value: "4" } } ]
"""

_DETECTOR = """\
name: "detector"
backend: "$backend"
max_batch_size: $max_batch_size
version_policy { latest { num_versions: 1 } }
# Requests that wait for the network are joined to one batch.
dynamic_batching { }
instance_group [ { kind: $kind count: 1 } ]
input [
  { name: "images" data_type: TYPE_UINT8 dims: [ $height, $width, 3 ] },
  { name: "image_sizes" data_type: TYPE_INT32 dims: [ 2 ] }
]
output [
  { name: "boxes" data_type: TYPE_FP32 dims: [ $detections, 4 ] },
  { name: "scores" data_type: TYPE_FP32 dims: [ $detections ] },
  { name: "classes" data_type: TYPE_INT32 dims: [ $detections ] },
  { name: "count" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
]
"""

_ENSEMBLE = """\
name: "detect"
platform: "ensemble"
max_batch_size: $max_batch_size
version_policy { latest { num_versions: 1 } }
input [ { name: "image" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [
  { name: "boxes" data_type: TYPE_FP32 dims: [ $detections, 4 ] },
  { name: "scores" data_type: TYPE_FP32 dims: [ $detections ] },
  { name: "classes" data_type: TYPE_INT32 dims: [ $detections ] },
  { name: "count" data_type: TYPE_INT32 dims: [ 1 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "preprocess"
      model_version: -1
      input_map { key: "image" value: "image" }
      output_map { key: "images" value: "images" }
      output_map { key: "image_sizes" value: "image_sizes" }
    },
    {
      model_name: "detector"
      model_version: -1
      input_map { key: "images" value: "images" }
      input_map { key: "image_sizes" value: "image_sizes" }
      output_map { key: "boxes" value: "boxes" }
      output_map { key: "scores" value: "scores" }
      output_map { key: "classes" value: "classes" }
      output_map { key: "count" value: "count" }
    }
  ]
}
parameters [ { key: "class_names" value { string_value: $class_names } } ]
"""

_README = """\
# $app for Triton

The model `detect` takes the bytes of an image file. It returns boxes (left, top, right, bottom in pixels of
the image), scores, classes (`labels.txt` begins with class 0) and their count. On a host without a GPU, leave
out `--gpus=all`. NVIDIA's container has never run this repository.

    docker run --rm --gpus=all -p 8000:8000 -p 8001:8001 -v "$$PWD:/models:ro" $container \\
        tritonserver --model-repository=/models
    pip install 'tritonclient[http]'
    python client.py photo.jpg
"""

_CLIENT = '''\
"""Sends image files to the model `detect` on a Triton server, and prints the detections.

    python client.py photo.jpg other.png
    TRITON=host:8000 python client.py photo.jpg

Each request has one image, because all rows of a request's array have the same length.
"""

import json
import os
import sys

import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient(os.environ.get("TRITON", "localhost:8000"))
parameters = client.get_model_config("detect")["parameters"]
names = json.loads(parameters["class_names"]["string_value"])
for path in sys.argv[1:]:
    encoded = np.fromfile(path, np.uint8)[np.newaxis]  # (1, bytes)
    image = triton.InferInput("image", encoded.shape, "UINT8")
    image.set_data_from_numpy(encoded)
    result = client.infer("detect", [image])
    boxes, scores, classes, count = map(result.as_numpy, ("boxes", "scores", "classes", "count"))
    for i in range(count[0, 0]):
        if scores[0, i] >= 0.3:
            print(path, names[classes[0, i]], f"{scores[0, i]:.2f}", boxes[0, i].round(1))
'''


def write(
    directory: pathlib.Path,
    model_suffix: str,
    write_model: Callable[[pathlib.Path], object],
    placement: Placement,
    metadata: dict[str, Any],
) -> None:
    """Writes a model repository into the empty directory `directory`.

    Args:
        model_suffix: ".onnx" or ".plan".
        write_model: called with the path of the detector, `MODEL` with this suffix. NMS must be in it.
        metadata: the model's metadata: app, label_map, num_classes and config.
    """
    config, names = metadata["config"], LabelMap.from_json(metadata["label_map"]).names
    names += tuple(f"class {number}" for number in range(len(names), metadata["num_classes"]))
    height, width = config["image_size"]
    is_engine = model_suffix == ".plan"
    values = {
        "app": metadata["app"],
        "backend": "tensorrt" if is_engine else "onnxruntime",
        "kind": "KIND_GPU" if is_engine else "KIND_AUTO",
        "class_names": json.dumps(json.dumps(names)),
        "container": CONTAINER,
        "detections": config["max_detections"],
        "height": height,
        "width": width,
        "max_batch_size": MAX_BATCH_SIZE,
    }
    for name, text in (("preprocess", _PREPROCESS), ("detector", _DETECTOR), (ENSEMBLE, _ENSEMBLE)):
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(string.Template(text).substitute(values))
    write_model((directory / MODEL).with_suffix(model_suffix))
    constants = {
        "HEIGHT": height,
        "WIDTH": width,
        "KEEP_ASPECT": placement.keep_aspect,
        "CENTERED": placement.centered,
        "ANTIALIAS": placement.antialias,
        "BATCH_SIZE": MAX_BATCH_SIZE,
    }
    (directory / "preprocess" / "1" / "dali.py").write_text(_with_constants(constants))
    lines = (" ".join(name.splitlines()) for name in names)  # one line for each class
    (directory / "labels.txt").write_text("".join(f"{line}\n" for line in lines))
    (directory / "client.py").write_text(_CLIENT)
    (directory / "README.md").write_text(string.Template(_README).substitute(values))


def _with_constants(constants: dict[str, Any]) -> str:
    """Returns the source of triton_preprocess.py with other values of its constants."""
    source = pathlib.Path(__file__).with_name("triton_preprocess.py").read_text()
    for name, value in constants.items():
        source = re.sub(rf"(?m)^{name} = \w+", f"{name} = {value}", source)
    return source
