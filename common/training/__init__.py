"""The training loop's parts: checkpoints, EMA, step guard, logs, weights files."""
