r"""Measures how fast EfficientDet loads and trains on this machine, and what each stage costs.

    python efficientdet/bench.py --model_name=efficientdet-d0 --batch_size=8 \
        --train_images=my/images --train_annotations=my/instances.json --json=runs/bench/d0.json

Without data flags, the command uses synthetic images.
To compare two --json files: python tools/bench.py compare OLD.json NEW.json
"""

import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.benchmark import options

APP = options.App(
    name="efficientdet",
    num_classes=90,
    stages={
        "read": "reader",
        "decode": "Image|ImageSlice",
        "resize": "Resize",
        "augment": "Flip|GridMask|ColorTwist",
        "normalize": "CropMirrorNormalize",
    },
    fixed={},
)

if __name__ == "__main__":
    options.main(APP)
