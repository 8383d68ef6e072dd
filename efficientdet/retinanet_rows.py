"""The RetinaNet models of config.py.

Sources: arXiv 1708.02002, and NVIDIA/retinanet-examples, called odtk here, with the defaults of odtk/main.py.
"""

_RETINANET = {
    "architecture": "retinanet",
    "bn_momentum": 0.9,  # same as torchvision's 0.1, because PyTorch's momentum is the share of the new value
    "focal_gamma": 2.0,  # odtk/loss.py
    "huber_delta": 0.11,  # odtk/model.py: SmoothL1Loss(beta=0.11) is the Huber loss divided by 0.11
    "box_loss_weight": 4 / 0.11,  # odtk sums over four coordinates, losses.py averages them
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
    "warmup_learning_rate": 0.001,  # a tenth of the learning rate, as in odtk/train.py, schedule
    "epochs": 0,
    "lr_schedule": "milestones",
    "iterations": 90_000,  # 12.2 epochs of COCO train2017
    "milestones": (60_000, 80_000),
    "warmup_iterations": 1000,
    "ema_decay": 0.0,
}
# Not published; see `_NANO` in config.py.
_NANO = {
    "anchor_scale": 2.0,
    "jitter_min": 0.8,
    "jitter_max": 1.25,
    "optimizer": "adam",
    "learning_rate": 0.012,  # for 64 images; lower than for efficientdet-nano, whose heads have batch norms
    "warmup_learning_rate": 0.001,
    "clip_norm": 10.0,
    "ema_decay": 0.99,
    "epochs": 30,
}
_SIDE = 1280  # side of odtk's exported models; odtk's training resizes to at most 1333 and pads to 1408
_BACKBONES = {  # odtk/backbones/fpn.py
    "rn18": "resnet-18",
    "rn34": "resnet-34",
    "rn50": "resnet-50",
    "rn101": "resnet-101",
    "rn152": "resnet-152",
    "mobilenetv2": "mobilenet-v2",
}

# model: (image side, backbone, channels of the pyramid, number of BiFPN cells, head repeats, other fields).
# A RetinaNet has no BiFPN, so its number of cells has no effect.
RETINANETS: dict[str, tuple[int, str, int, int, int, dict]] = {
    f"retinanet-{name}fpn": (_SIDE, backbone, 256, 1, 4, _RETINANET | _RECIPE)
    for name, backbone in _BACKBONES.items()
} | {"retinanet-nano": (256, "resnet-nano", 64, 1, 2, _RETINANET | _NANO)}
