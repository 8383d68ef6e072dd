"""RetinaNet's rows of the table in config.py: structure and recipe, with their sources.

arXiv 1708.02002; NVIDIA/retinanet-examples is odtk here, and its defaults are those of odtk/main.py.
"""

_RETINANET = {
    "architecture": "retinanet",
    "bn_momentum": 0.9,  # torchvision's 0.1, which is the share of the new value
    "focal_gamma": 2.0,  # odtk/loss.py
    "huber_delta": 0.11,  # odtk/model.py: SmoothL1Loss(beta=0.11), which is the Huber loss over its delta,
    "box_loss_weight": 4 / 0.11,  # summed over the four coordinates, where losses.py takes their mean
    "weight_decay": 1e-4,
    "clip_norm": 0.0,
    "nms_method": "hard",
}
_RECIPE = {
    "augmentation": "resize_range",
    "resize_min": 640,
    "resize_max": 1024,
    "learning_rate": 0.01,
    "reference_batch": 16,  # 2 images on each of 8 GPUs
    "warmup_learning_rate": 0.001,  # odtk/train.py, schedule: from a tenth
    "epochs": 0,
    "lr_schedule": "milestones",
    "iterations": 90_000,  # 12.2 epochs of COCO train2017
    "milestones": (60_000, 80_000),
    "warmup_iterations": 1000,
    "ema_decay": 0.0,
}
# Not published. Small anchors, little jitter and Adam have the reasons of efficientdet-nano in config.py.
_NANO = {
    "anchor_scale": 2.0,
    "jitter_min": 0.8,
    "jitter_max": 1.25,
    "optimizer": "adam",
    "learning_rate": 0.012,  # of 64 images: heads without norm bear less than the other nano
    "warmup_learning_rate": 0.001,
    "clip_norm": 10.0,
    "ema_decay": 0.99,
    "epochs": 30,
}
_SIDE = 1280  # of odtk's export; its training goes up to 1333, padded to 1408
_BACKBONES = {  # odtk/backbones/fpn.py
    "rn18": "resnet-18",
    "rn34": "resnet-34",
    "rn50": "resnet-50",
    "rn101": "resnet-101",
    "rn152": "resnet-152",
    "mobilenetv2": "mobilenet-v2",
}

# model: image side, backbone, channels of the pyramid, 1, head repeats, and what else differs from the
# defaults of config.EfficientDetConfig.
RETINANETS: dict[str, tuple[int, str, int, int, int, dict]] = {
    f"retinanet-{name}fpn": (_SIDE, backbone, 256, 1, 4, _RETINANET | _RECIPE)
    for name, backbone in _BACKBONES.items()
} | {"retinanet-nano": (256, "resnet-nano", 64, 1, 2, _RETINANET | _NANO)}
