"""`--freeze`: layers that do not train, by name."""

import re

import keras

from common.errors import UserError


def freeze(model: keras.Model, pattern: str) -> str:
    """Stops the layers whose name matches from training, their batch norms from updating.

    Args:
        model: a built model.
        pattern: a regular expression that is searched for in the names of the layers.

    Returns:
        One line that says which.

    Raises:
        UserError: the pattern is none, matches no layer, or leaves nothing to train.
    """
    try:
        frozen = [layer for layer in model.layers if layer.weights and re.search(pattern, layer.name)]
    except re.error as error:
        raise UserError(f"--freeze={pattern!r} is not a regular expression: {error}") from error
    if not frozen:
        names = sorted({layer.name.split(".")[0] for layer in model.layers if layer.weights})
        raise UserError(f"--freeze={pattern!r} matches no layer; names start with {', '.join(names)}")
    for layer in frozen:
        layer.trainable = False
    if not model.trainable_variables:
        raise UserError(f"--freeze={pattern!r} leaves nothing to train")
    return f"frozen: {len(frozen)} layers, {frozen[0].name} to {frozen[-1].name}"
