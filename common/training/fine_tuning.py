"""--init_from and --freeze."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from common.args import Args
from common.progress import log
from common.training import model_metadata
from common.training.freezing import freeze
from common.training.run import Run
from common.training.weight_transfer import Report


def set_initial_weights(
    a: Args, run: Run, model: keras.Model, metadata: Mapping[str, Any], init_from: Callable[[], Report]
) -> Report | None:
    """Loads --init_from on rank 0 of a new run, whose weights `run.start` broadcasts, and freezes --freeze.

    Args:
        a: the flags.
        run: says whether the run continues from a checkpoint.
        model: with all layers trainable.
        metadata: of this run, to explain how that of the file differs.
        init_from: loads the file into the model.

    Returns:
        What was taken from the file; None where nothing was.

    Raises:
        UserError: on every rank: the file cannot be used, or the pattern fits no layer or all.
    """
    report = None
    with run.ranks.raise_on_any_rank():
        if a.init_from and run.resumed:
            log(f"--init_from={a.init_from} is not read again: this run goes on from its own checkpoint")
        elif a.init_from and run.ranks.rank == 0:
            report = init_from()
            log(str(report))
            title = f"--init_from={a.init_from} was trained otherwise"
            model_metadata.explain_file(a.init_from, metadata, title)
        if a.freeze:
            log(freeze(model, a.freeze))
    return report
