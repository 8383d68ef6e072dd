"""The parts of the training loop: checkpoints, EMA, step guard, logs, weights files."""
