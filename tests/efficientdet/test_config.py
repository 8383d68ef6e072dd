"""A run of an earlier version is the same run: its run.json has these fields of the config and no others."""

from common.args import Args
from common.distributed.ranks import Ranks
from common.labels import LabelMap
from common.training.run_directory import Identity
from efficientdet.config import DETECTION_FIELDS, get_config
from efficientdet.model_metadata import make_metadata

# EfficientDetConfig before RetinaNet's fields, without what may change between two sittings.
FIRST = """model_name image_size backbone fpn_channels fpn_cells head_repeats fpn_fusion bn_momentum min_level
max_level num_scales aspect_ratios anchor_scale augmentation jitter_min jitter_max resize_min resize_max
flip_prob grid_mask_prob brightness contrast saturation hue min_box_size max_instances focal_alpha focal_gamma
label_smoothing huber_delta box_loss_weight weight_decay optimizer momentum learning_rate reference_batch
warmup_learning_rate warmup_epochs clip_norm ema_decay"""


def differences(config) -> dict:
    """What makes a run with this config another one than the run of the earlier version."""
    metadata = make_metadata(config, LabelMap.numbered(3), 3)
    identity = Identity.of(Args(), Ranks(), config, metadata, may_change=("epochs", *DETECTION_FIELDS))
    before = {name: metadata["config"][name] for name in FIRST.split()}
    return identity.differences(identity.values | {"config": before})


def test_a_run_of_an_earlier_version_is_taken_up_again():
    assert differences(get_config("efficientdet-d7x")) == {}


def test_what_that_version_could_not_do_is_another_run():
    found = differences(get_config("retinanet-rn50fpn"))
    assert found["config.architecture"] == ("efficientdet", "retinanet")
    assert {"config.lr_schedule", "config.iterations"} <= found.keys()
