"""A package, so that it is found before the `tests` that tf2onnx installs."""
