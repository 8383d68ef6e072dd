"""The parts of preprocess.py: image sources, the chain of operators, and outputs."""
