"""Run by test_launching.py under horovodrun: each rank prints, as one line of JSON, what its Ranks did.

After that rank 1, where there is one, has a problem with what the user gave.
"""

import hashlib
import json
import os

import keras
import numpy as np
import tensorflow as tf

from common import errors
from common.distributed.ranks import HorovodRanks
from common.errors import UserError

LARGE = 60_000_000  # bytes: what a checkpoint of one rank may be


def work(ranks: HorovodRanks) -> dict:
    squeezed = HorovodRanks("fp16")
    names = ("strategy", "rank", "local_rank", "world_size", "num_replicas", "local_replicas")
    facts = {name: getattr(ranks, name) for name in names}
    me = float(ranks.rank)

    # Scalars and gradients, compiled as a training step is. 1/3 has no exact float16.
    @tf.function
    def step(third):
        gradients = [tf.fill((2, 3), third * (me + 2.0)), tf.constant([me, -me, 1e-3])]
        scalars = ranks.mean({"loss": third * me, "a_count": tf.constant(ranks.rank)})
        return scalars, ranks.average(gradients), squeezed.average(gradients)

    scalars, averaged, halves = step(tf.constant(1.0 / 3.0))
    facts["mean"] = {name: value.numpy().item() for name, value in scalars.items()}
    facts["average"] = [gradient.numpy().tolist() for gradient in averaged]
    facts["average_fp16"] = [gradient.numpy().tolist() for gradient in halves]
    facts["dtypes"] = [gradient.dtype.name for gradient in halves]

    # The variables of a Keras model and its optimizer, after a step: floats and an int64 counter.
    keras.utils.set_random_seed(ranks.rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    for _ in range(ranks.rank + 1):
        optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
    variables = [variable.value for variable in (*model.weights, *optimizer.variables)]
    facts["variables_before"] = [variable.numpy().tolist() for variable in variables]
    ranks.broadcast(variables)
    facts["variables_after"] = [variable.numpy().tolist() for variable in variables]

    # Means of what differs, which leave it as it is.
    statistics = [tf.Variable([me, 2.0]), tf.Variable(10.0 * me)]
    facts["means"] = [value.numpy().tolist() for value in ranks.mean_over_ranks(statistics)]
    facts["statistics"] = [variable.numpy().tolist() for variable in statistics]
    facts["means_of_nothing"] = ranks.mean_over_ranks([])

    # Objects: of other types and lengths on each rank, and large ones.
    facts["broadcast_object"] = ranks.broadcast_object(
        {"from": 0, "b": [None, 1.5]} if ranks.rank == 0 else None
    )
    facts["gather"] = ranks.gather({"rank": 1, "blue": "\N{WHALE}"} if ranks.rank else None)
    large = np.random.default_rng(ranks.rank).bytes(LARGE + ranks.rank)
    facts["large"] = [[len(data), hashlib.sha256(data).hexdigest()] for data in ranks.gather(large)]
    facts["own_large"] = hashlib.sha256(large).hexdigest()

    facts["first_on_host"] = ranks.first_on_host(lambda: _look_and_leave_a_trace(ranks.rank))
    return facts


def _look_and_leave_a_trace(rank: int) -> list[str]:
    seen = sorted(name for name in os.listdir(".") if name.startswith("trace"))
    open(f"trace{rank}", "x").close()
    return seen


def main() -> None:
    ranks = HorovodRanks()
    print(json.dumps(work(ranks)), flush=True)
    with ranks.raise_on_any_rank():
        pass  # nobody has a problem
    with ranks.raise_on_any_rank():
        if ranks.rank == 1:
            raise UserError("--batch_size=0 is none: give at least 1")
    ranks.close()


if __name__ == "__main__":
    errors.run(main)
