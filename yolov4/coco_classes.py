"""The classes of Darknet's weights: the 80 of COCO (AlexeyAB/darknet data/coco.names), or a .names file's.

Darknet has the 80 in the order of COCO's category ids, which have gaps, and six of them as Pascal VOC spells
them (motorbike, aeroplane, sofa, pottedplant, diningtable, tvmonitor). The names here are COCO's own.
"""

import os
import pathlib

from common.errors import UserError
from common.labels import LabelMap

# category id: name, from instances_val2017.json
_CATEGORIES = {
    1: "person",
    2: "bicycle",
    3: "car",
    4: "motorcycle",
    5: "airplane",
    6: "bus",
    7: "train",
    8: "truck",
    9: "boat",
    10: "traffic light",
    11: "fire hydrant",
    13: "stop sign",
    14: "parking meter",
    15: "bench",
    16: "bird",
    17: "cat",
    18: "dog",
    19: "horse",
    20: "sheep",
    21: "cow",
    22: "elephant",
    23: "bear",
    24: "zebra",
    25: "giraffe",
    27: "backpack",
    28: "umbrella",
    31: "handbag",
    32: "tie",
    33: "suitcase",
    34: "frisbee",
    35: "skis",
    36: "snowboard",
    37: "sports ball",
    38: "kite",
    39: "baseball bat",
    40: "baseball glove",
    41: "skateboard",
    42: "surfboard",
    43: "tennis racket",
    44: "bottle",
    46: "wine glass",
    47: "cup",
    48: "fork",
    49: "knife",
    50: "spoon",
    51: "bowl",
    52: "banana",
    53: "apple",
    54: "sandwich",
    55: "orange",
    56: "broccoli",
    57: "carrot",
    58: "hot dog",
    59: "pizza",
    60: "donut",
    61: "cake",
    62: "chair",
    63: "couch",
    64: "potted plant",
    65: "bed",
    67: "dining table",
    70: "toilet",
    72: "tv",
    73: "laptop",
    74: "mouse",
    75: "remote",
    76: "keyboard",
    77: "cell phone",
    78: "microwave",
    79: "oven",
    80: "toaster",
    81: "sink",
    82: "refrigerator",
    84: "book",
    85: "clock",
    86: "vase",
    87: "scissors",
    88: "teddy bear",
    89: "hair drier",
    90: "toothbrush",
}


def coco_label_map() -> LabelMap:
    """Class 0..79 <-> COCO's category id 1..90 <-> COCO's name."""
    return LabelMap(tuple(_CATEGORIES), tuple(_CATEGORIES.values()))


NUM_COCO_CLASSES = len(_CATEGORIES)

_VOC_SPELLINGS = {
    "motorcycle": "motorbike",
    "airplane": "aeroplane",
    "couch": "sofa",
    "potted plant": "pottedplant",
    "dining table": "diningtable",
    "tv": "tvmonitor",
}


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
    if names in (coco.names, tuple(_VOC_SPELLINGS.get(name, name) for name in coco.names)):
        return coco
    try:
        return LabelMap.from_categories({"id": i, "name": name} for i, name in enumerate(names, 1))
    except UserError as error:
        raise UserError(f"class names {file}: {error}") from error
