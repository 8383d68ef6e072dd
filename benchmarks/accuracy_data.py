r"""Writes a COCO data set in the formats that the programs of benchmarks/accuracy.py read.

    python benchmarks/accuracy_data.py --output_dir=runs/accuracy/data/bccd \
        --train_images=bccd/images --train_annotations=bccd/instances_train.json \
        --eval_images=bccd/images --eval_annotations=bccd/instances_val.json

The labels of `images/train2017` are in `labels/train2017`, where Darknet and Ultralytics find them. Each
image file is named after its image id. Category ids are the class indexes plus 1. `records/` has TFRecords.
Ultralytics reads data.yaml. Darknet reads names.txt, train2017.txt and val2017.txt.
"""

import dataclasses
import json
import pathlib
import shutil
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
from absl import flags

from common import args as shared_flags
from common import errors
from common.args import flag
from common.data.annotations import Annotations
from common.data.coco import load_coco
from common.data.labels import LabelMap
from common.errors import UserError
from common.files import make_output_directory, user_errors
from common.progress import import_tensorflow
from tools.conversion.coco_writer import write_coco

TRAIN, EVAL = "train2017", "val2017"


@dataclasses.dataclass(frozen=True)
class DataArgs:
    output_dir: str = flag("", "Directory to which the data set is written.")
    train_images: str = flag("", "Directory of training images.")
    train_annotations: str = flag("", "COCO json of the training images.")
    eval_images: str = flag("", "Directory of evaluation images.")
    eval_annotations: str = flag("", "COCO json of the evaluation images.")


def write_split(annotations: Annotations, images_dir: str, output: pathlib.Path, split: str) -> None:
    """Writes one split: images, YOLO labels, a COCO json, TFRecords, and a list of the images.

    `split` is TRAIN or EVAL.
    """
    names = [
        f"{i:012}{pathlib.Path(name).suffix}"
        for i, name in zip(annotations.image_ids, annotations.file_names, strict=True)
    ]
    targets = annotations.target_boxes
    left_top, right_bottom = np.split(targets.boxes, 2, axis=1)
    boxes_cxcywh = np.concatenate([(left_top + right_bottom) / 2, right_bottom - left_top], axis=1)
    rows = [
        " ".join([f"{k}", *(f"{v:.6f}" for v in box)])
        for k, box in zip(targets.classes, boxes_cxcywh, strict=True)
    ]
    images, labels = output / "images" / split, output / "labels" / split
    for directory in (images, labels):
        if directory.exists():
            raise UserError(f"{directory} exists: remove it, or give another --output_dir")
        directory.mkdir(parents=True)
    for i, (old, new) in enumerate(zip(annotations.file_names, names, strict=True)):
        shutil.copyfile(pathlib.Path(images_dir, old), images / new)
        image_rows = rows[targets.row_splits[i] : targets.row_splits[i + 1]]
        (labels / new).with_suffix(".txt").write_text("".join(f"{row}\n" for row in image_rows))
    label_map = LabelMap(tuple(range(1, annotations.label_map.num_classes + 1)), annotations.label_map.names)
    category_ids = annotations.label_map.classes_of(annotations.category_ids).astype(np.int64) + 1
    numbered = dataclasses.replace(
        annotations, label_map=label_map, category_ids=category_ids, file_names=names
    )
    write_coco(numbered, output / f"annotations/instances_{split}.json")
    import_tensorflow()
    from tools.conversion.coco_to_tfrecord import write_tfrecords

    write_tfrecords(numbered, images, output / "records" / split, num_shards=1)
    (output / f"{split}.txt").write_text("".join(f"{images / name}\n" for name in names))


def write_data_set(a: DataArgs) -> None:
    """Writes both splits. Raises UserError for data that cannot be used."""
    for name, value in dataclasses.asdict(a).items():
        if not value:
            raise UserError(f"--{name} is missing")
    train = load_coco(a.train_annotations, a.train_images)
    evaluation = load_coco(a.eval_annotations, a.eval_images)
    if train.label_map != evaluation.label_map:
        raise UserError(f"{a.train_annotations} and {a.eval_annotations} must have the same categories")
    output = make_output_directory(a.output_dir).resolve()
    with user_errors(f"--output_dir={output}"):
        write_split(train, a.train_images, output, TRAIN)
        write_split(evaluation, a.eval_images, output, EVAL)
        names = train.label_map.names
        (output / "names.txt").write_text("".join(f"{name}\n" for name in names))
        yolo = {
            "path": str(output),
            "train": f"images/{TRAIN}",
            "val": f"images/{EVAL}",
            "names": dict(enumerate(names)),
        }
        (output / "data.yaml").write_text(json.dumps(yolo))  # JSON is also YAML


def main() -> None:
    write_data_set(DataArgs(**shared_flags.values(flags.FLAGS, define_flags)))


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define(fv, DataArgs)


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
