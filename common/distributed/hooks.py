"""What elastic training and the dry run add to a training run, without changing `train`.

    train(args)                                                     # a plain run
    train(args, Hooks(on_epoch=commit, lost_ranks="report"))        # elastic.py
    train(args, Hooks(on_step=...))                                 # tools/dry_run_process.py

`args` is the app's frozen `Args`: `dataclasses.asdict(args)` is what JSON can hold, `train.Args(**values)`
makes it again, and `dataclasses.replace(args, overwrite=False)` changes a flag.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.training.run import Run


def _nothing(*_: Any) -> None:
    """The default of a hook that only observes."""


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Callables that `train` and its `Run` call. Every rank calls them at the same place, in the same order.

    Attributes:
        on_step: (run, images, targets), called after each training step, when `run.state["step"]` is its
            number and before anything of it is saved. `run.ranks`, `run.model`, `run.optimizer` and
            `run.state` ("epoch": epochs done, "step", "step_in_epoch") stay valid to the end.
            `targets["image_ids"]` names the images (one value for each local replica under tf.distribute).
        on_epoch: called with the number of epochs done, after their checkpoint is written. What it raises
            ends `train`.
        expected_epochs: that the run is known to have done. A directory with fewer is refused.
        lost_ranks: what happens when another rank is lost (Watchdog's `on_loss`). exit: this process ends
            with code 1. report: the error of the collective operation propagates.
    """

    on_step: Callable[["Run", Any, Any], None] = _nothing
    on_epoch: Callable[[int], None] = _nothing
    expected_epochs: int = 0
    lost_ranks: str = "exit"
