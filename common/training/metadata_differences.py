"""Two passports compared: which field, the value of each, and what follows from the difference."""

import json
from collections.abc import Mapping
from typing import Any

from common.labels import LabelMap

_STRUCTURE = "another network: weights whose shape differs start anew"
_BOXES = "box outputs are relative to other anchors: they must be trained again"
_PIXELS = "the network sees other pixels than it learnt: AP falls until it is trained on them"
_DETECTION = "other detections from the same outputs: AP was measured with the saved value"
_TRAINING = "of training alone: no detection changes, further training does"
_LAST_DIGITS = "results may differ in their last digits"

# Both apps' fields. What is in no row here is a choice of training.
_FOLLOWS = {
    "app": "another app's model: its weights cannot be loaded",
    "classes": "outputs of classes of the same name can be kept, those of all others start anew",
    "category_ids": "the same classes under other ids: detections come out with the ids of now",
    "num_classes": "rows of the class outputs without a counterpart start anew",
    "config.image_size": "it runs, but objects have another size than it learnt: evaluate it first",
    "train_data": "other images or annotations were trained on",
    "eval_data": "AP was measured on other images: the two numbers do not compare",
    "export": "another file format or arithmetic: evaluate it for itself",
    **dict.fromkeys(
        (
            "config.model_name",
            "config.architecture",
            "config.backbone",
            "config.fpn_channels",
            "config.fpn_cells",
            "config.fpn_fusion",
            "config.head_repeats",
            "config.width",
        ),
        _STRUCTURE,
    ),
    **dict.fromkeys(
        (
            "config.min_level",
            "config.max_level",
            "config.num_scales",
            "config.aspect_ratios",
            "config.anchor_scale",
            "config.anchors",
            "config.masks",
            "config.scale_xy",
        ),
        _BOXES,
    ),
    **dict.fromkeys(("config.letterbox", "config.antialias"), _PIXELS),
    **dict.fromkeys(
        (
            "config.nms_method",
            "config.nms_iou",
            "config.nms_sigma",
            "config.diou_beta",
            "config.score_threshold",
            "config.nms_candidates",
            "config.max_detections",
        ),
        _DETECTION,
    ),
}
_FOLLOWS_IN_SECTION = {"preprocessing": _PIXELS, "versions": _LAST_DIGITS, "export": _FOLLOWS["export"]}
_SHOWN_NAMES = 5


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], words: tuple[str, str] = ("saved", "now")
) -> list[str]:
    """`config.nms_iou: saved 0.5, now 0.6: ...`, one line for each field that both have and that differs.

    Anchors follow from the config, and so does how images are resized: the config's own lines say it.

    Args:
        saved, now: passports.
        words: what each is called.
    """
    before, after = _flat(saved), _flat(now)
    return [
        f"{field}: {words[0]} {_text(before[field])}, {words[1]} {_text(after[field])}: {_follows(field)}"
        for field in before
        if field in after and before[field] != after[field]
    ]


def _flat(passport: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: passport[name] for name in ("app", "num_classes") if name in passport}
    if "label_map" in passport:
        label_map = LabelMap.from_json(passport["label_map"])
        fields["classes"] = sorted(label_map.names)
        fields["category_ids"] = dict(sorted(zip(label_map.names, label_map.category_ids, strict=True)))
    for section in ("config", "preprocessing", "versions", "export"):
        for name, value in passport.get(section, {}).items():
            fields[f"{section}.{name}"] = json.loads(json.dumps(value))  # tuples and lists are the same
    if "config.letterbox" in fields:
        fields.pop("preprocessing.resize", None)
    if "config.antialias" in fields:
        fields.pop("preprocessing.antialias", None)
    data = ("train_data", "eval_data")
    return fields | {name: passport[name] for name in data if passport.get(name) is not None}


def _follows(field: str) -> str:
    section = field.partition(".")[0]
    return _FOLLOWS.get(field) or _FOLLOWS_IN_SECTION.get(section, _TRAINING)


def _text(value: Any) -> str:
    """Short enough for a line."""
    if isinstance(value, Mapping):
        value = [f"{name} {number}" for name, number in value.items()]
    if isinstance(value, list) and value and isinstance(value[0], str):
        shown = ", ".join(value[:_SHOWN_NAMES])
        return f"{shown} and {len(value) - _SHOWN_NAMES} more" if len(value) > _SHOWN_NAMES else shown
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:20]}..."
