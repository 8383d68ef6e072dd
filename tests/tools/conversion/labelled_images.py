"""Writes small sets of labelled images."""

import functools
import os
import pathlib

import PIL.Image

from common.args import ImagePolicy
from common.data.check.issues import DataError
from tests.refusal import refusal
from tools.convert import Options

SKIP = ImagePolicy(on_bad_image="skip")


def write_file(directory, name, content):
    """`content` is text, bytes or an image."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, PIL.Image.Image):
        content.save(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def black_image():
    """Its height is 20 and its width 40."""
    return PIL.Image.new("RGB", (40, 20))


def write_yolo(directory):
    for stem, label in (("a", "0 0.5 0.5 0.25 0.5"), ("b", "1 0.25 0.5 0.5 1")):
        write_file(directory, f"images/{stem}.png", black_image())
        write_file(directory, f"labels/{stem}.txt", label + "\n")
    write_file(directory, "classes.txt", "cat\ndog\n")
    return directory


def contents_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def read_functions(read):
    """Returns three functions that call `read`.

    The first returns the result. The second expects a UserError and returns its message. The third expects a
    DataError and returns its message.
    """

    def call(path, *, policy=ImagePolicy(), **options):
        return read(os.fspath(path), policy=policy, **_with_texts(options))

    return call, functools.partial(refusal, call), functools.partial(refusal, call, error=DataError)


def options_of(**options):
    return Options(**_with_texts(options))


def _with_texts(options):
    """Paths become texts, as on a command line."""
    return {k: os.fspath(v) if isinstance(v, pathlib.Path) else v for k, v in options.items()}
