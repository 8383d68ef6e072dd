r"""Converts a data set from Pascal VOC, YOLO txt, COCO json or TFRecords to COCO json or TFRecords.

    python tools/convert.py --from=voc --to=coco --input=VOCdevkit/VOC2012 --split=train \
        --output=voc/instances_train.json
    python tools/convert.py --from=yolo --to=tfrecord --input=my/data.yaml --split=val --output=records/val
    python tools/convert.py --from=coco --to=tfrecord --input=my/instances.json --images=my/images \
        --output=records/train --num_shards=4
    python tools/convert.py --from=tfrecord --to=coco --input='records/train*.tfrecord' \
        --output=my/instances.json
    python tools/convert.py --from=coco --to=coco --input=my/instances.json --images=my/images \
        --output=my/small/instances.json --max_side=1024 --holdout=0.2

The command lists all errors in the input before it writes anything. voc.py, yolo.py and labels.py in
tools/conversion/ describe the conversion of ids, difficult objects and polygons. --to=coco does not copy
image files. If the input is TFRecords, it writes their images into the directory `images` next to --output.

--max_side=N scales larger images down. With --to=tfrecord, the TFRecords contain the scaled images. With
--to=coco, all images are written into the directory `images_N` next to the json. Images from TFRecords are
written into `images` instead.

--holdout=F splits the images into two outputs. The fraction F of the images goes to OUTPUT_val, and the rest
goes to OUTPUT_train. The split depends only on the file names and --seed.
"""

import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors
from common.data.check.issues import Issues
from common.data.open import log_issues
from tools.conversion.convert import convert
from tools.conversion.options import Options, define_flags, refuse_idle_flags


def main() -> None:
    refuse_idle_flags(flags.FLAGS)
    values = shared_flags.values(flags.FLAGS, define_flags)
    source, target = values.pop("from"), values.pop("to")
    options = Options(**values)
    written, images_dir = convert(source, target, options)
    annotations = next(iter(written.values()))
    issues = Issues(annotations.origin)
    issues.extend(annotations.issues)
    log_issues(issues)
    for output, part in written.items():
        print(part.summary())
        print(f"{target}: {output}; images: {images_dir}")


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
