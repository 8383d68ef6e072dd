import dataclasses

import pytest

from yolov4.config import DETECTION_FIELDS, LOADER_FIELDS, MODEL_NAMES, YOLOv4Config, get_config

YOLOV4 = get_config("yolov4")
EVERY_MODEL = (
    {"ignore_thresh": 0.7, "obj_normalizer": 1.0, "cls_normalizer": 1.0, "label_smoothing": 0.0}
    | {"flip_prob": 0.5, "mosaic_tiles": "batch", "mixup_prob": 0.0, "cutmix_prob": 0.0}
    | {"min_box_size": 1.0, "antialias": True, "letterbox": False}
    | {"weight_decay": 0.0005, "reference_batch": 64, "lr_steps": (0.8, 0.9), "lr_step_factor": 0.1}
    | {"nms_method": "greedy", "diou_beta": 0.6, "nms_iou": 0.6, "score_threshold": 0.001}
    | {"nms_candidates": 1000, "max_detections": 100}
)
DARKNET = (
    {"hue": 36.0, "saturation": 1.5, "exposure": 1.5}  # hue: 0.1 of a turn
    | {"jitter": 0.3, "iou_normalizer": 0.07, "box_gradient": "darknet", "size_weighting": False}
    | {"bn_momentum": 0.99, "objectness_bias": 0.0, "close_mosaic": 0, "ema_decay": 0.0}
    | {"burn_in_steps": 1000, "burn_in_power": 4.0, "lr_schedule": "steps", "max_instances": 200}
    | {"optimizer": "sgd", "clip_norm": 0.0, "objectness_iou": 0.0, "neighbour_cells": False}
    | {"class_prior": False}
)
PUBLISHED = {
    "yolov4": DARKNET
    | {"image_size": (608, 608), "iou_thresh": 0.213, "max_delta": 5.0, "multi_scale": 1.4, "epochs": 271}
    | {"mosaic_prob": 0.5, "momentum": 0.949, "learning_rate": 0.0013, "width": 1.0},
    "yolov4-tiny": DARKNET
    | {"image_size": (416, 416), "iou_thresh": 1.0, "max_delta": 0.0, "multi_scale": 1.0, "epochs": 1082}
    | {"mosaic_prob": 0.0, "momentum": 0.9, "learning_rate": 0.00261, "width": 1.0},
    "yolov4-nano": {"image_size": (256, 256), "width": 0.5, "optimizer": "adam", "close_mosaic": 5}
    | {"cls_normalizer": 8.0, "objectness_iou": 1.0, "class_prior": True, "mosaic_prob": 0.0}
    | {"jitter": 0.1, "hue": 10.0, "saturation": 1.2, "exposure": 1.2},  # as --augmentation_preset=light
}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_yolov4_config_has_the_published_numbers(name):
    expected = EVERY_MODEL | PUBLISHED[name]
    config = get_config(name)
    assert {field: getattr(config, field) for field in expected} == expected
    assert config.strides == ((16, 32) if name == "yolov4-tiny" else (8, 16, 32))
    assert config.anchors_per_location == 3


def test_multi_scale_sizes_are_multiples_of_32_in_the_shape_of_the_input():
    assert YOLOV4.size_range == (14, 27)
    wide = dataclasses.replace(YOLOV4, image_size=(96, 160), multi_scale=2.0)
    assert wide.size_range == (2, 6)
    assert [wide.bucket(units) for units in (2, 3, 6)] == [(64, 96), (96, 160), (192, 320)]
    assert dataclasses.replace(wide, multi_scale=4.0, image_size=(32, 32)).size_range == (1, 4)
    assert dataclasses.replace(wide, image_size=(160, 96)).bucket(2) == (96, 64)


def test_loader_fields_and_detection_fields_are_all_fields_of_their_section_of_the_config():
    names = [field.name for field in dataclasses.fields(YOLOv4Config)]
    assert list(LOADER_FIELDS) == names[names.index("antialias") : names.index("max_instances") + 1]
    assert list(DETECTION_FIELDS) == names[names.index("nms_method") : names.index("max_detections") + 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": (64, 100)}, "multiples of 32"),
        ({"masks": ((0, 1, 2), (3, 4, 5))}, "for the 3 heads"),
        ({"scale_xy": (1.0, 1.0)}, "for the 3 heads"),
        ({"scale_xy": (1.0, 1.0, 0.99)}, "scale_xy of at least 1"),
        ({"neighbour_cells": True}, "at least 2 with neighbour_cells"),
        ({"masks": ((0, 1, 2), (3, 4, 5), (6, 7))}, "masks of the same length"),
        ({"masks": ((0, 1, 2), (3, 4, 5), (6, 7, 9))}, "masks with indices of existing anchors"),
        ({"masks": ((-1, 1, 2), (3, 4, 5), (6, 7, 8))}, "masks with indices of existing anchors"),
        ({"anchors": YOLOV4.anchors[:-1]}, "anchors as pairs"),
        ({"anchors": (0.0, *YOLOV4.anchors[1:])}, "anchors above 0"),
        ({"multi_scale": 4.1}, "multi_scale of at most 4"),
        ({"lr_steps": (0.9, 0.8)}, "lr_steps above 0, up to 1 and ascending"),
        ({"lr_steps": (0.0, 0.8)}, "lr_steps above 0, up to 1 and ascending"),
        ({"lr_steps": (0.8, 1.1)}, "lr_steps above 0, up to 1 and ascending"),
        ({"jitter": 0.5}, "jitter below 0.5"),
        ({"mosaic_tiles": "new"}, r"mosaic_tiles.*expected one of batch"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else None,
)
def test_config_value_outside_its_range_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(YOLOV4, **change)


def test_config_value_at_its_limit_is_accepted():
    dataclasses.replace(YOLOV4, jitter=0.49, multi_scale=4.0, lr_steps=(0.5, 1.0), scale_xy=(1.0, 1.0, 1.0))
