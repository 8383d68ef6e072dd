"""Reads published weights: google/automl's checkpoints, ImageNet backbones of Keras and PyTorch."""
