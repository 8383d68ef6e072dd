r"""How fast YOLOv4 loads and trains on this machine, and what each stage costs.

    python yolov4/bench.py --model_name=yolov4 --image_size=416 --batch_size=4 \
        --train_images=my/images --train_annotations=my/instances.json --json=runs/bench/yolov4.json

Without data it draws some. How it measures: tools/benchmark/measuring.py.
Two --json files side by side: python tools/bench.py compare OLD.json NEW.json
"""

import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from common.progress import import_tensorflow

if __name__ == "__main__":
    import_tensorflow()  # without its first lines

from tools.benchmark import measuring
from tools.benchmark.worker import App
from yolov4 import config, loaders, optimization, predict, train

APP = App(
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
    fixed={"multi_scale": 1.0},  # one size: rates of many sizes would need long windows
    config=config,
    loaders=loaders,
    optimization=optimization,
    predict=predict,
    train=train,
)

if __name__ == "__main__":
    measuring.main(APP)
