"""Joins several COCO jsons, each with a directory of images, to one data set."""

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from common.data.annotations import Annotations
from common.errors import UserError
from common.progress import counted


def coco_inputs(files: str, directories: str | None) -> list[tuple[str, str]]:
    """Returns (json, directory of its images) of --input and --images, which may name several."""
    if not directories:
        raise UserError("--from=coco needs --images=DIR, the directory that the json's file names refer to")
    if os.path.exists(files):  # the name of a file may have a comma
        return [(files, directories)]
    names, folders = ([path.strip() for path in paths.split(",")] for paths in (files, directories))
    if len(names) != len(folders):
        raise UserError(
            f"--input names {counted(len(names), 'file')}, but --images "
            f"{counted(len(folders), 'folder')}: give one for each"
        )
    return list(zip(names, folders, strict=True))


def join(inputs: list[tuple[str, str]], load: Callable[[str, str], Annotations]) -> tuple[Annotations, str]:
    """Returns the joined annotations, and the directory that contains all images.

    Image ids are numbers from 1 on. File names begin with the folder below this directory.

    Args:
        inputs: (json, directory of its images) of each part.
        load: `load_coco` with the policy of the command.

    Raises:
        UserError: the categories of two jsons differ, or an image is in more than one json.
    """
    parts = [load(*pair) for pair in inputs]
    first, root = parts[0], os.path.relpath(os.path.commonpath([os.path.abspath(d) for _, d in inputs]))
    for part in parts:
        differences = first.label_map.differences(part.label_map, f"in {first.origin}")
        differences += part.label_map.differences(first.label_map, f"in {part.origin}")
        if differences:
            raise UserError(f"jsons to join need the same categories: {differences[0]}")
    offsets = np.cumsum([0, *(part.num_images for part in parts)])
    names = [
        os.path.normpath(os.path.join(os.path.relpath(directory, root), name))
        for (_, directory), part in zip(inputs, parts, strict=True)
        for name in part.file_names
    ]
    if len(set(names)) < len(names):
        repeated = next(name for name, count in collections.Counter(names).items() if count > 1)
        raise UserError(
            f"{os.path.join(root, repeated)} is an image of more than one json: join only jsons of different "
            "images, because each copy of an image would lack the boxes of the other json"
        )
    names_of_arrays = ("image_sizes", "boxes_ltwh_px", "category_ids", "is_crowd", "areas")
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in names_of_arrays
    }
    joined = dataclasses.replace(
        first,
        image_ids=np.arange(1, offsets[-1] + 1),
        file_names=names,
        box_image=np.concatenate([part.box_image + i for part, i in zip(parts, offsets, strict=False)]),
        origin=", ".join(part.origin for part in parts),
        issues=list(itertools.chain(*(part.issues for part in parts))),
        checksums=None,
        **arrays,
    )
    return joined, root
