"""A stand-in for Triton's DALI backend, in Python.

Like DaliModel and DaliModelInstance::ExecuteBatched of github.com/triton-inference-server/dali_backend, it
serializes dali.py and joins the samples of all requests to one batch. If DALI fails, they all fail.
"""

import importlib.util
import json
import pathlib
import sys
import tempfile

import numpy as np
import triton_python_backend_utils as triton
from nvidia import dali
from nvidia.dali._utils.autoserialize import invoke_autoserialize


def serialized(path: pathlib.Path) -> bytes:
    """Returns the serialized pipeline of a dali.py, as GenerateAutoserializeCmd of model_provider.h does."""
    spec = importlib.util.spec_from_file_location("autoserialize_mod", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["autoserialize_mod"] = module
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        invoke_autoserialize(module, f"{folder}/model.dali")
        return pathlib.Path(folder, "model.dali").read_bytes()


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        folder = pathlib.Path(args["model_repository"], args["model_version"])
        threads = int(config["parameters"]["num_threads"]["string_value"])
        self.options = {"batch_size": config["max_batch_size"], "num_threads": threads, "device_id": None}
        self.model = serialized(folder / "dali.py")
        self.make_pipeline()
        self.outputs = [output["name"] for output in config["output"]]

    def make_pipeline(self) -> None:
        self.pipeline = dali.Pipeline.deserialize(self.model, **self.options)
        self.pipeline.build()

    def execute(self, requests: list) -> list:
        images = [triton.get_input_tensor_by_name(each, "image").as_numpy() for each in requests]
        try:
            self.pipeline.feed_input("image", [row for array in images for row in array])
            outputs = [np.array(output.as_array()) for output in self.pipeline.run()]
        except RuntimeError as error:
            self.make_pipeline()  # as DaliExecutor::Run does
            failure = triton.TritonError(f"DALI error: {error}")
            return [triton.InferenceResponse([], failure) for _ in requests]
        places = np.cumsum([len(array) for array in images])[:-1]
        responses = []
        for parts in zip(*(np.split(output, places) for output in outputs), strict=True):
            named = zip(self.outputs, parts, strict=True)
            responses.append(triton.InferenceResponse([triton.Tensor(*pair) for pair in named]))
        return responses
