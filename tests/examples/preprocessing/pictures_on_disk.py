"""PNGs of several shapes, smooth enough to be resized."""

import pathlib

import numpy as np
import PIL.Image

SIZES = ((48, 64), (64, 48), (57, 91), (40, 40), (31, 77))


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """Returns uint8 (height, width, 3). A red upper left corner shows how an image was rotated."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    channels = []
    for _ in range(3):
        fy, fx, phase = rng.uniform(0.05, 0.25, 3)
        channels.append(127 + 90 * np.sin(fy * y + fx * x + 20 * phase))
    image = np.stack(channels, axis=-1)
    image[: height // 6, : width // 4] = (250, 10, 40)
    return image.astype(np.uint8)


PICTURES = [picture(*size, seed) for seed, size in enumerate(SIZES)]


def write_pictures(directory: pathlib.Path) -> pathlib.Path:
    """Writes cats/0.png to cats/2.png, "two dogs/3.png" and "two dogs/4.png"."""
    for number, image in enumerate(PICTURES):
        path = directory / ("cats" if number < 3 else "two dogs") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(image).save(path)
    return directory
