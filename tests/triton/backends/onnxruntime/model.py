"""A stand-in for Triton's ONNX Runtime backend, in Python. It joins its requests to one batch."""

import json
import pathlib

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        file = pathlib.Path(args["model_repository"], args["model_version"], "model.onnx")
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs = ([each["name"] for each in config[key]] for key in ("input", "output"))

    def execute(self, requests: list) -> list:
        inputs = {}
        for name in self.inputs:
            arrays = [triton.get_input_tensor_by_name(each, name).as_numpy() for each in requests]
            inputs[name], places = np.concatenate(arrays), np.cumsum([len(array) for array in arrays])[:-1]
        outputs = self.session.run(self.outputs, inputs)
        responses = []
        for parts in zip(*(np.split(output, places) for output in outputs), strict=True):
            named = zip(self.outputs, parts, strict=True)
            responses.append(triton.InferenceResponse([triton.Tensor(*pair) for pair in named]))
        return responses
