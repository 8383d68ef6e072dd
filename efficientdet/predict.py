"""Turns weights into detections, for evaluation during training, eval.py and infer.py."""

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.weights import trained
from efficientdet import postprocess
from efficientdet.config import DETECTION_FIELDS, EfficientDetConfig
from efficientdet.model import build_model
from efficientdet.model_metadata import make_metadata

APP = trained.App(
    name="efficientdet",
    config_class=EfficientDetConfig,
    detection_fields=DETECTION_FIELDS,
    build_model=build_model,
    make_metadata=make_metadata,
    postprocess=postprocess.detect,
    mean_rgb=IMAGENET_MEAN,
    stddev_rgb=IMAGENET_STD,
    converter="python efficientdet/automl_weights.py",
)
make_detect, make_halves, to_pixels = APP.make_detect, APP.make_halves, APP.to_pixels
load_trained = APP.load
