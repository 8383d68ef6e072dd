import dataclasses

import pytest

from common import hparams
from common.args import Args
from common.data.labels import LabelMap
from common.distributed.ranks import Ranks
from common.training.run_directory import Identity
from efficientdet.config import DETECTION_FIELDS, LOADER_FIELDS, EfficientDetConfig, get_config
from efficientdet.model_metadata import make_metadata


def test_efficientdet_has_the_published_rows():
    """Table 1 of arXiv 1911.09070. d7x and sum fusion are from efficientdet/README.md of google/automl."""
    rows = [get_config(f"efficientdet-d{size}") for size in (*range(8), "7x")]
    assert [row.image_size[0] for row in rows] == [512, 640, 768, 896, 1024, 1280, 1280, 1536, 1536]
    assert [row.image_size[1] for row in rows] == [row.image_size[0] for row in rows]
    assert [row.backbone[-2:] for row in rows] == ["b0", "b1", "b2", "b3", "b4", "b5", "b6", "b6", "b7"]
    assert [row.fpn_channels for row in rows] == [64, 88, 112, 160, 224, 288, 384, 384, 384]
    assert [row.fpn_cells for row in rows] == [3, 4, 5, 6, 7, 7, 8, 8, 8]
    assert [row.head_repeats for row in rows] == [3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert [row.fpn_fusion for row in rows] == ["fast"] * 6 + ["sum"] * 3
    assert [(row.max_level, row.anchor_scale) for row in rows] == [(7, 4)] * 7 + [(7, 5), (8, 4)]


def test_run_from_before_a_field_resumes_with_its_default_and_with_no_other_value():
    config = get_config("efficientdet-d0")
    metadata = make_metadata(config, LabelMap.numbered(3), 3)
    before = {name: value for name, value in metadata["config"].items() if name != "cutout_prob"}
    assert hparams.from_json(EfficientDetConfig, before) == config
    for value, differences in ((0.0, {}), (0.5, {"config.cutout_prob": (0.0, 0.5)})):
        metadata["config"]["cutout_prob"] = value
        identity = Identity.of(Args(), Ranks(), config, metadata, may_change=("epochs", *DETECTION_FIELDS))
        without = {name: v for name, v in identity.values["config"].items() if name != "cutout_prob"}
        assert identity.differences(identity.values | {"config": without}) == differences


def test_sections_of_the_fields():
    assert (LOADER_FIELDS[0], LOADER_FIELDS[-1]) == ("augmentation", "max_instances")
    assert (DETECTION_FIELDS[0], DETECTION_FIELDS[-1]) == ("nms_method", "max_detections")


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
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(get_config("retinanet-rn50fpn"), **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_level": 1, "max_level": 5},
        {"min_level": 5},
        {"resize_min": 1, "resize_max": 1},
        {"jitter_min": 2.0},
        {"milestones": (1, 90_000)},
        {"warmup_iterations": 90_000},
    ],
)
def test_settings_at_the_limits(fields):
    dataclasses.replace(get_config("retinanet-rn50fpn"), **fields)


# Anchors of google/automl's EfficientDet-D0 to D7x.
ANCHOR_COUNTS = {
    "0": 49_104,
    "1": 76_725,
    "2": 110_484,
    "3": 150_381,
    "4": 196_416,
    "5": 306_900,
    "6": 306_900,
}
ANCHOR_COUNTS |= {"7": 441_936, "7x": 442_260}


@pytest.mark.parametrize(("number", "count"), ANCHOR_COUNTS.items())
def test_anchor_counts_are_those_of_the_published_models(number, count):
    anchors = get_config(f"efficientdet-d{number}").anchors
    assert anchors.num_anchors == count
    cells = [height * width for height, width in anchors.feature_sizes]
    assert sum(cells) * anchors.anchors_per_location == count
