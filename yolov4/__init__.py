"""The YOLOv4 app. Data, model, losses, training, evaluation and inference have one file each."""
