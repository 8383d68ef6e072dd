"""Exports trained detectors to files that run without this project: saved_model, ONNX, LiteRT, TensorRT."""
