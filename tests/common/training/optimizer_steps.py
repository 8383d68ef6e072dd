import keras
import numpy as np


def updates(optimizer: keras.optimizers.Optimizer, gradients: list[list[float]]) -> list[np.ndarray]:
    """Returns the values of a variable of two zeros after each gradient."""
    variable = keras.Variable(np.zeros(2, np.float32))
    optimizer.build([variable])
    values = []
    for gradient in gradients:
        optimizer.apply([optimizer.scale_loss(np.array(gradient, np.float32))], [variable])
        values.append(np.array(variable))
    return values
