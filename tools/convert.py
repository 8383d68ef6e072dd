r"""Converts data sets: Pascal VOC, YOLO txt, COCO and TFRecords to COCO json or to TFRecords.

    python tools/convert.py --from=voc --to=coco --input=VOCdevkit/VOC2012 --split=train \
        --output=voc/instances_train.json
    python tools/convert.py --from=yolo --to=tfrecord --input=my/data.yaml --split=val --output=records/val
    python tools/convert.py --from=coco --to=tfrecord --input=my/instances.json --images=my/images \
        --output=records/train --num_shards=4
    python tools/convert.py --from=tfrecord --to=coco --input='records/train*.tfrecord' \
        --output=my/instances.json
    python tools/convert.py --from=coco --to=coco --input=my/instances.json --images=my/images \
        --output=my/small/instances.json --max_side=1024 --holdout=0.2

It lists everything that is wrong with the input, with its file, before it writes anything. voc.py, yolo.py
and labels.py in tools/conversion/ describe what becomes of ids, difficult objects, polygons and so on. A COCO
json goes with the images where they lie, and its file names are relative to the directory that is printed;
only images in TFRecords are written anew, to `images` beside --output.

--max_side=N makes larger images smaller (shrinking.py): in the records, or as files in `images_N` beside the
json. --holdout=F writes two outputs in place of one, OUTPUT_train and OUTPUT_val. The second holds that share
of the images. The split depends on file names and --seed alone.
"""

import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors
from common.datacheck.datasets import log_issues
from common.datacheck.issues import Issues
from tools.conversion.convert import convert
from tools.conversion.options import Options, define_flags, refuse_idle_flags


def main() -> None:
    """The command."""
    refuse_idle_flags(flags.FLAGS)
    values = shared_flags.values(flags.FLAGS, define_flags)
    source, target = values.pop("from"), values.pop("to")
    options = Options(**values)
    written, images_dir = convert(source, target, options)
    annotations = next(iter(written.values()))  # each part has the issues of the whole
    issues = Issues(annotations.origin)
    issues.extend(annotations.issues)
    log_issues(issues)
    for output, part in written.items():
        print(part.summary())
        print(f"{target}: {output}; images: {images_dir}")


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
