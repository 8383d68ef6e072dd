"""`--elastic`: a run continues when hosts are lost or added (Horovod Elastic).

    horovodrun --gloo -np 8 --min-np 4 --max-np 8 --host-discovery-script ./hosts.sh \
        python efficientdet/train.py --strategy=horovod --elastic ...

hosts.sh prints a line `host:slots` for each available host; Horovod runs it every second. If a process dies,
Horovod stops using its host (--blacklist-cooldown-range lets the host come back). A lost host is noticed at
once; a new host joins at the end of an epoch. Then each process calls `train` again, which resumes from the
checkpoint of the last complete epoch. All hosts need access to the run directory.

If a process raises an error, all processes end.
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

_PLACE = "training", "failure"  # scope and key of a rank's error in the launcher's key-value store


def run(train: Callable[[Any, Hooks], Any], a: Any) -> Any:
    """Trains under Horovod Elastic; calls `train` again whenever the hosts change.

    Without an elastic launcher, `train` is called once.

    Args:
        train: an app's `train`. Its hook `on_epoch` lets new hosts join after an epoch is saved.

    Returns:
        The result of `train`.

    Raises:
        UserError: Horovod is not installed, or the strategy is not Horovod's.
        OtherRankError: another rank failed and reports the reason.
    """
    if a.strategy != "horovod":
        raise UserError("--elastic works only with Horovod: add --strategy=horovod")
    if os.environ.get("HOROVOD_ELASTIC") != "1":  # set by horovodrun
        return train(a, Hooks())
    hvd = initialize()  # call this before the state below uses a GPU
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from horovod.runner.http import http_client

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epochs=0, begun=False)

    def on_epoch(epochs: int) -> None:
        state.epochs = epochs
        state.commit()  # raises HostsUpdatedInterrupt if hosts were added or removed

    @hvd.elastic.run
    def attempt(state: Any) -> Any:
        progress.be_quiet(hvd.rank() > 0)  # rank 1 may have become rank 0
        # --overwrite applies to the first attempt only.
        again = dataclasses.replace(a, overwrite=False) if state.begun else a
        state.begun = True
        state.save()
        keras.backend.clear_session()
        gc.collect()  # frees the previous attempt
        try:
            return train(again, Hooks(on_epoch=on_epoch, expected_epochs=state.epochs, lost_ranks="report"))
        except (HorovodInternalError, HostsUpdatedInterrupt, StoppedError, OtherRankError):
            raise  # all ranks get these errors
        except Exception as error:
            # A rank that fails stores its error with the launcher, where the other ranks read it.
            server = [os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{part}"] for part in ("ADDR", "PORT")]
            if not isinstance(error, tf.errors.OpError | RuntimeError) or not is_lost_rank(error):
                with contextlib.suppress(RuntimeError, OSError):  # ignored: a lost launcher ends all ranks
                    http_client.put_data_into_kvstore(*server, *_PLACE, f"rank {hvd.rank()}: {error}")
                raise
            with contextlib.suppress(RuntimeError, OSError):  # raised if no error is stored
                raise OtherRankError(http_client.read_data_from_kvstore(*server, *_PLACE)) from error
            raise HorovodInternalError(str(error)) from error

    return attempt(state)
