"""EfficientDet: data, model, losses, training, evaluation and inference, one file each."""
