"""`--init_from`: weights of an earlier run as a starting point, whatever its classes and image size were."""

import keras

from common.errors import UserError
from efficientdet.predict import load_trained


def init_from(model: keras.Model, weights: str) -> str:
    """Copies every weight whose name and shape agree; the others keep their initial values.

    Another class count changes the shape of the class head's last layer only, so just that layer is made
    anew.

    Args:
        model: the model to start.
        weights: a weights file of ours, or a run directory.

    Returns:
        One line: how many weights were taken, which were made anew.

    Raises:
        UserError: the file cannot be read, or nothing in it fits.
    """
    source = {weight.path: weight for weight in load_trained(weights)[0].weights}
    made_anew = []
    for weight in model.weights:
        other = source.get(weight.path)
        if other is not None and other.shape == weight.shape:
            weight.assign(other)
        else:
            made_anew.append(weight.path)
    taken = len(model.weights) - len(made_anew)
    if not taken:
        raise UserError(f"--init_from={weights}: none of its {len(source)} weights fits {model.name}")
    layers = sorted({path.rpartition("/")[0] for path in made_anew})
    anew = f", made anew: {', '.join(layers)}" if layers else ""
    return f"--init_from={weights}: {taken} of {len(model.weights)} weights taken{anew}"
