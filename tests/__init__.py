"""A package, because tf2onnx installs one of this name, which would come first: ours has to be found before."""
