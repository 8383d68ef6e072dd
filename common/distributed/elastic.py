"""`--elastic`: losing a host, or gaining one, does not end the run (Horovod Elastic).

    horovodrun --gloo -np 8 --min-np 4 --max-np 8 --host-discovery-script ./hosts.sh \
        python efficientdet/train.py --strategy=horovod --elastic ...

hosts.sh prints a line `host:slots` for each host that is there now; Horovod asks it every second. A host
whose process dies is left out from then on (--blacklist-cooldown-range lets it come back). A loss is noticed
at once, a new host joins at the end of an epoch. Horovod then forms the ring anew, and every process in it
enters training anew: it finds the checkpoint of the last whole epoch, as after any other interruption, and
goes on with the ranks that there are. What was trained since that epoch is trained again. So the run
directory must lie where all hosts see it.

Only a dead process counts as lost. An error in one process ends all of them: it would happen again.
"""

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from common import progress
from common.distributed.ranks import Hooks, initialize
from common.errors import OtherRankError, StoppedError, UserError, is_lost_rank

_PLACE = "training", "failure"  # scope and key of a rank's failure in the launcher's key-value store


def run(train: Callable[[Any, Hooks], Any], a: Any) -> Any:
    """Trains under Horovod Elastic, again whenever the hosts change.

    Without a launcher that is elastic it trains once: the flag then only lets a run go on with another number
    of ranks than it had.

    Args:
        train: an app's `train`; its hook `on_epoch` takes in new hosts when an epoch is saved.
        a: the flags, a frozen dataclass.

    Returns:
        What `train` returns.

    Raises:
        UserError: Horovod is not installed, or the strategy is not Horovod's.
        OtherRankError: another rank failed, and reports it.
    """
    if a.strategy != "horovod":
        raise UserError("--elastic is Horovod's: it needs --strategy=horovod")
    if os.environ.get("HOROVOD_ELASTIC") != "1":  # set by horovodrun
        return train(a, Hooks())
    hvd = initialize()  # before the state below runs anything on a GPU
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from horovod.runner.http import http_client

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epochs=0, begun=False)

    def on_epoch(epochs: int) -> None:
        state.epochs = epochs
        state.commit()  # raises HostsUpdatedInterrupt where hosts have come or gone

    @hvd.elastic.run
    def attempt(state: Any) -> Any:
        progress.be_quiet(hvd.rank() > 0)  # rank 1 may have become rank 0
        # --overwrite is for the first attempt: the others go on from it.
        again = dataclasses.replace(a, overwrite=False) if state.begun else a
        state.begun = True
        state.save()
        keras.backend.clear_session()
        gc.collect()  # the attempt before: its model, its loaders and their threads
        try:
            return train(again, Hooks(on_epoch=on_epoch, expected_epochs=state.epochs, lost_ranks="report"))
        except (HorovodInternalError, HostsUpdatedInterrupt, StoppedError, OtherRankError):
            raise  # known to all ranks
        except Exception as error:
            # The launcher empties its store when it forms the ring anew: after every process is gone or has
            # come back. A rank that sees that another is gone still finds its last message there.
            server = [os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{part}"] for part in ("ADDR", "PORT")]
            if not isinstance(error, tf.errors.OpError | RuntimeError) or not is_lost_rank(error):
                with contextlib.suppress(RuntimeError, OSError):  # without a launcher no rank continues
                    http_client.put_data_into_kvstore(*server, *_PLACE, f"rank {hvd.rank()}: {error}")
                raise
            with contextlib.suppress(RuntimeError, OSError):  # nothing was told
                raise OtherRankError(http_client.read_data_from_kvstore(*server, *_PLACE)) from error
            raise HorovodInternalError(str(error)) from error

    return attempt(state)
