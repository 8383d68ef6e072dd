import dataclasses

import pytest

from common import hparams
from common.args import Args
from common.data.labels import LabelMap
from common.distributed.ranks import Ranks
from common.training.checkpoints import Identity
from efficientdet.config import DETECTION_FIELDS, LOADER_FIELDS, EfficientDetConfig, get_config
from efficientdet.model_metadata import make_metadata


def test_efficientdet_models_have_the_published_settings():
    """Table 1 of arXiv 1911.09070. d7x, sum fusion and the number of anchors are google/automl's."""
    rows = [get_config(f"efficientdet-d{size}") for size in (*range(8), "7x")]
    assert [row.image_size[0] for row in rows] == [512, 640, 768, 896, 1024, 1280, 1280, 1536, 1536]
    assert [row.image_size[1] for row in rows] == [row.image_size[0] for row in rows]
    assert [row.backbone[-2:] for row in rows] == ["b0", "b1", "b2", "b3", "b4", "b5", "b6", "b6", "b7"]
    assert [row.fpn_channels for row in rows] == [64, 88, 112, 160, 224, 288, 384, 384, 384]
    assert [row.fpn_cells for row in rows] == [3, 4, 5, 6, 7, 7, 8, 8, 8]
    assert [row.head_repeats for row in rows] == [3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert [row.fpn_fusion for row in rows] == ["fast"] * 6 + ["sum"] * 3
    assert [(row.max_level, row.anchor_scale) for row in rows] == [(7, 4)] * 7 + [(7, 5), (8, 4)]
    counts = [49_104, 76_725, 110_484, 150_381, 196_416, 306_900, 306_900, 441_936, 442_260]
    assert [row.anchors.num_anchors for row in rows] == counts


def test_run_of_an_earlier_version_resumes_only_with_the_default_of_a_new_field():
    config = get_config("efficientdet-d0")
    metadata = make_metadata(config, LabelMap.numbered(3), 3)
    earlier = {name: value for name, value in metadata["config"].items() if name != "cutout_prob"}
    assert hparams.from_json(EfficientDetConfig, earlier) == config
    for value, differences in ((0.0, {}), (0.5, {"config.cutout_prob": (0.0, 0.5)})):
        metadata["config"]["cutout_prob"] = value
        identity = Identity.of(Args(), Ranks(), config, metadata, may_change=("epochs", *DETECTION_FIELDS))
        without = {name: v for name, v in identity.values["config"].items() if name != "cutout_prob"}
        assert identity.differences(identity.values | {"config": without}) == differences


def test_loader_fields_and_detection_fields_are_all_fields_of_their_section_of_the_config():
    names = [field.name for field in dataclasses.fields(EfficientDetConfig)]
    assert list(LOADER_FIELDS) == names[names.index("augmentation") : names.index("max_instances") + 1]
    assert list(DETECTION_FIELDS) == names[names.index("nms_method") : names.index("max_detections") + 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_level": 0}, "need 1 <= min_level <= 5 <= max_level"),
        ({"min_level": 6}, "need 1 <= min_level <= 5 <= max_level"),
        ({"max_level": 4}, "need 1 <= min_level <= 5 <= max_level"),
        ({"resize_min": 0}, "need 0 < resize_min <= resize_max"),
        ({"resize_min": 1025}, "need 0 < resize_min <= resize_max"),
        ({"jitter_min": 0.0}, "need 0 < jitter_min <= jitter_max"),
        ({"jitter_min": 2.1}, "need 0 < jitter_min <= jitter_max"),
        ({"epochs": 0, "iterations": 0, "milestones": ()}, "need epochs or iterations of at least 1"),
        ({"milestones": (80_000, 60_000)}, "in ascending order"),
        ({"milestones": (0, 60_000)}, "from 1 to iterations"),
        ({"milestones": (60_000, 90_001)}, "from 1 to iterations"),
        ({"lr_schedule": "cosine", "iterations": 0, "epochs": 3}, "need milestones from 1 to iterations"),
        ({"milestones": (), "iterations": 0, "epochs": 3}, "need milestones from 1 to iterations"),
        ({"warmup_iterations": 90_001}, "need warmup_iterations <= iterations"),
        ({"lr_schedule": "steps"}, "one of cosine, milestones"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_config_value_outside_its_range_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(get_config("retinanet-rn50fpn"), **fields)


def test_config_value_at_its_limit_is_accepted():
    for fields in [
        {"min_level": 1, "max_level": 5},
        {"min_level": 5},
        {"resize_min": 1, "resize_max": 1},
        {"jitter_min": 2.0},
        {"milestones": (1, 90_000)},
        {"warmup_iterations": 90_000},
    ]:
        dataclasses.replace(get_config("retinanet-rn50fpn"), **fields)
