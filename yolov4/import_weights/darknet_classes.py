"""The classes of Darknet's weights: the 80 of COCO (AlexeyAB/darknet data/coco.names), or a .names file's.

Darknet has the 80 in the order of COCO's category ids, which have gaps, and six of them as Pascal VOC spells
them. The names here are COCO's own.
"""

import os
import pathlib

from common.errors import UserError
from common.labels import NUM_COCO_CLASSES, VOC_SPELLINGS, LabelMap, coco_label_map


def read_label_map(weights: str | os.PathLike, num_classes: int) -> LabelMap | None:
    """The classes of a .weights file: from the .names file beside it, one name a line, or the 80 of COCO.

    A .names file of the 80, in either spelling, gets COCO's names and category ids, another one ids 1, 2, ...

    Returns:
        None where there is no such file and `num_classes` is not 80.

    Raises:
        UserError: the .names file cannot be read, names a class twice, or has not `num_classes` names.
    """
    coco = coco_label_map()
    file = pathlib.Path(weights).with_suffix(".names")
    if not file.exists():
        return coco if num_classes == NUM_COCO_CLASSES else None
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"class names {file}: {error}") from error
    names = tuple(line for line in lines if line)
    if len(names) != num_classes:
        raise UserError(f"class names {file}: {len(names)} names for the {num_classes} classes of {weights}")
    if names in (coco.names, tuple(VOC_SPELLINGS.get(name, name) for name in coco.names)):
        return coco
    try:
        return LabelMap.from_categories({"id": i, "name": name} for i, name in enumerate(names, 1))
    except UserError as error:
        raise UserError(f"class names {file}: {error}") from error
