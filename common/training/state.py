"""The state of a run beside its variables: how far it is, its place in the data, its best evaluation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from common.errors import UserError


@dataclasses.dataclass
class RunState:
    """What a checkpoint stores besides variables. All values are plain: they are saved as JSON.

    Attributes:
        epoch: number of epochs done.
        step: number of training steps done.
        step_in_epoch: number of steps done in the present epoch; 0 between two epochs.
        totals: sums of the present epoch's scalars (EpochLog); {} between two epochs.
        loader_options: the options of the open loaders, such as their seed; {} before they are opened.
        batches_read: number of batches read from the open loaders.
        evaluated: progress at the last evaluation, in epochs (Run.progress); 0 without one.
        best_ap: AP of the best evaluation; None without one.
        best_eval_data: fingerprint of the data of that evaluation.
        evaluations_since_best: number of evaluations after the best one.
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    loader_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    batches_read: int = 0
    evaluated: float = 0.0
    best_ap: float | None = None
    best_eval_data: str | None = None
    evaluations_since_best: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: str) -> "RunState":
        """Returns the state that a checkpoint stores.

        Args:
            values: name of a field -> its value.
            origin: name of the checkpoint for the message.

        Raises:
            UserError: the fields are not those of this version.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if differing := sorted(names ^ values.keys()):
            raise UserError(
                f"{origin} is of another version of this project, whose state differs in "
                f"{', '.join(differing)}. Continue with that version, or give --overwrite to start anew"
            )
        return cls(**values)
