"""Small sets of labelled images: their files, and a reader called with paths in place of strings."""

import os
import pathlib

import PIL.Image

from common.args import ImagePolicy
from tools.conversion.options import Options

SKIP = ImagePolicy(on_bad_image="skip")
WIDTH, HEIGHT = 40, 20


def put(directory, name, content):
    """Writes a picture, text or bytes to a file, whose directory is made."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, PIL.Image.Image):
        content.save(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def picture():
    return PIL.Image.new("RGB", (WIDTH, HEIGHT))


def options_of(**options):
    return Options(**{k: os.fspath(v) if isinstance(v, pathlib.Path) else v for k, v in options.items()})
