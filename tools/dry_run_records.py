"""What `--dry_run` collects: from each process, from each sitting, in all."""

import dataclasses
from typing import Any

import msgspec


class RankFacts(msgspec.Struct):
    """What one process of one sitting heard.

    Attributes:
        rank, world_size: as Horovod told it.
        versions: library -> version.
        fingerprint: of the small training set.
        steps: taken in each epoch of this sitting.
        first_step: number of the first one; None where there was none.
        trained_ids: image ids of the batches of each epoch.
        shard_ids: image ids of this rank's part of the first epoch, by the reader alone.
        rates: after each step, how many batches the optimizer has counted, and its learning rate then.
        weights: digest of the trainable weights after the last step.
        trainable_values: how many numbers those are.
        evaluated: image ids of each evaluation.
        ap: of the last evaluation.
        loaded: weights file -> what was wrong with it, "" for nothing; rank 0's.
    """

    rank: int
    world_size: int
    versions: dict[str, str]
    fingerprint: str
    steps: list[int]
    first_step: int | None
    trained_ids: list[list[int]]
    shard_ids: list[int]
    rates: list[tuple[int, float]]
    weights: str
    trainable_values: int
    evaluated: list[list[int]]
    ap: float | None
    loaded: dict[str, str]


@dataclasses.dataclass
class Sitting:
    """One start of all processes.

    Attributes:
        flags: what `train` was given.
        ranks: the facts, in the order of the ranks.
        rows: of results.csv.
        manifest: of the newest whole checkpoint; None where there is none.
        checkpoint_bytes: its size.
    """

    flags: dict[str, Any]
    ranks: list[RankFacts]
    rows: list[dict[str, str]]
    manifest: dict[str, Any] | None
    checkpoint_bytes: int


@dataclasses.dataclass
class Rehearsal:
    """All that the checks look at.

    Attributes:
        app: "efficientdet" or "yolov4".
        processes: how many took part.
        given: the real flags.
        config: the real config.
        images: of the whole training set.
        steps_per_epoch: of the real run with as many processes.
        sittings: the two.
        small_images, small_eval_images: image ids of the small sets; [] where there is none.
    """

    app: str
    processes: int
    given: dict[str, Any]
    config: Any
    images: int
    steps_per_epoch: int
    sittings: list[Sitting]
    small_images: list[int]
    small_eval_images: list[int]
