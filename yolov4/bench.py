r"""Measures how fast YOLOv4 loads and trains on this machine, and what each stage costs.

    python yolov4/bench.py --model_name=yolov4 --image_size=416 --batch_size=4 \
        --train_images=my/images --train_annotations=my/instances.json --json=runs/bench/yolov4.json

Without data flags, the command uses synthetic images.
To compare two --json files: python tools/bench.py compare OLD.json NEW.json
"""

import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.benchmark import options

APP = options.App(
    name="yolov4",
    num_classes=80,
    stages={
        "read": "reader",
        "decode": "Image|ImageSlice",
        "resize": "Resize",
        "color": "Hsv",
        "place": "Slice",
        "mosaic": "MultiPaste",
    },
    fixed={"multi_scale": 1.0},  # one image size: with many sizes, a measurement would take long
)

if __name__ == "__main__":
    options.main(APP)
