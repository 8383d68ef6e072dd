"""Published weights in: google/automl's checkpoints, ImageNet backbones of Keras and PyTorch."""
