"""This process as one rank of a run: TensorFlow and Keras set as the flags ask."""

import keras

from common import devices, progress
from common.args import Args
from common.distributed import ranks as distributed
from common.distributed.ranks import Ranks
from common.errors import UserError


def start_process(a: Args) -> Ranks:
    """Joins this process to its run. Call it before TensorFlow does anything else.

    Raises:
        UserError: --output_dir is missing; or see distributed.start.
    """
    if not a.output_dir:
        raise UserError("--output_dir is missing: name a directory for checkpoints and results")
    devices.reproducible()
    ranks = distributed.start(a.strategy, a.compression)
    progress.be_quiet(ranks.rank > 0)
    keras.utils.set_random_seed(a.seed)
    keras.mixed_precision.set_global_policy(a.precision)
    return ranks
