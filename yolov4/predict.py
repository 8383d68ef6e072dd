"""Turns weights into detections, for evaluation during training, eval.py and infer.py."""

from common.weights import trained
from yolov4 import postprocess
from yolov4.config import DETECTION_FIELDS, YOLOv4Config
from yolov4.model import build_model
from yolov4.model_metadata import make_metadata

APP = trained.App(
    name="yolov4",
    config_class=YOLOv4Config,
    detection_fields=DETECTION_FIELDS,
    build_model=build_model,
    make_metadata=make_metadata,
    postprocess=postprocess.detect,
    mean_rgb=(0.0, 0.0, 0.0),
    stddev_rgb=(255.0, 255.0, 255.0),
    converter="python yolov4/darknet_weights.py",
)
PICTURE_NMS_IOU = 0.45  # of infer.py and detector.py; AlexeyAB/darknet src/detector.c, test_detector
make_detect, make_halves, to_pixels = APP.make_detect, APP.make_halves, APP.to_pixels
load_trained = APP.load
