"""The 80 classes of COCO, and how Pascal VOC spells those of its 20 that it spells otherwise."""

from collections.abc import Sequence

from common.labels import LabelMap

# The categories of instances_val2017.json.
_UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # of the ids 1 to 90
_NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop
sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack,
umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball
glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana,
apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed,
dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink,
refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush
"""
_IDS = tuple(i for i in range(1, 91) if i not in _UNUSED)


def coco_label_map() -> LabelMap:
    """Class 0..79 <-> COCO's category id 1..90 <-> COCO's name."""
    return LabelMap(_IDS, tuple(" ".join(_NAMES.split()).split(", ")))


NUM_COCO_CLASSES = len(_IDS)

# COCO: Pascal VOC (host.robots.ox.ac.uk/pascal/VOC/voc2012, section 2). VOC's other 14 names are COCO's, too.
VOC_SPELLINGS = {
    "motorcycle": "motorbike",
    "airplane": "aeroplane",
    "couch": "sofa",
    "potted plant": "pottedplant",
    "dining table": "diningtable",
    "tv": "tvmonitor",
}
_COCO_SPELLINGS = {voc: coco for coco, voc in VOC_SPELLINGS.items()}


def find_class(name: str, names: Sequence[str]) -> int | None:
    """Where `name` stands in `names`: as it is, else in the other of COCO's and Pascal VOC's spellings.

    >>> find_class("sofa", ["cat", "couch"]), find_class("couch", ["sofa", "couch"]), find_class("cow", [])
    (1, 1, None)
    """
    for spelling in (name, VOC_SPELLINGS.get(name), _COCO_SPELLINGS.get(name)):
        if spelling is not None and spelling in names:
            return names.index(spelling)
    return None
