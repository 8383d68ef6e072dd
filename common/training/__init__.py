"""The parts of the training loop: checkpoints, input, EMA, step guard, logs."""
