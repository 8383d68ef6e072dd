"""YOLOv4: data, model, losses, training, evaluation and inference, one file each."""
