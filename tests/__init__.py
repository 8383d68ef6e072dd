"""Makes this directory a package, so that Python finds it before the package `tests` of tf2onnx."""
