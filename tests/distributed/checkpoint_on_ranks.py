"""On every rank: trains, saves in the middle of an epoch, goes on; or goes on from what was saved.

    horovodrun --gloo -np 2 python tests/distributed/checkpoint_on_ranks.py DIRECTORY save|resume

Only rank 0 is told the directory of the run. Every rank writes what it saw and what it ends with to
DIRECTORY/save_0.npz, ...
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import nvidia.dali.plugin.tf as dali_tf
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn

from common.distributed import ranks as distributed
from common.training.checkpoints import Checkpoints
from common.training.optimizers import AveragedWeights
from common.training.run_directory import Identity

BATCH = 4
BEFORE, AFTER = 3, 2  # steps


def batches(rank: int) -> tf.data.Iterator:
    @dali.pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=rank, enable_checkpointing=True)
    def pipeline():
        return fn.random.uniform(range=(0.0, 1.0 + rank), shape=(8, 8, 3), dtype=dali.types.FLOAT)

    return iter(
        dali_tf.DALIDataset(
            pipeline=pipeline(),
            batch_size=BATCH,
            output_shapes=((BATCH, 8, 8, 3),),
            output_dtypes=(tf.float32,),
            device_id=None,
        )
    )


def main(directory: pathlib.Path, what: str) -> None:
    ranks = distributed.start("horovod")
    keras.utils.set_random_seed(100 * ranks.rank + len(what))
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    ranks.broadcast([weight.value for weight in model.weights])
    averaged = AveragedWeights(model, 0.9)
    saved = Checkpoints(
        directory / "run" if ranks.rank == 0 else None,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        averaged=averaged,
        metadata={},
        identity=Identity({"num_ranks": ranks.world_size}),
    )
    data = batches(ranks.rank)
    saved.iterators = [data]
    seen = []

    def train(steps: int) -> None:
        for _ in range(steps):
            (images,) = next(data)
            seen.append(images.numpy())
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(images, training=True) - 1.0) ** 2)
            gradients = ranks.average(tape.gradient(loss, model.trainable_variables))
            optimizer.apply(gradients, model.trainable_variables)
            averaged.update()
            saved.state["step"] += 1
            saved.state["step_in_epoch"] += 1

    if what == "save":
        assert saved.find() is None
        train(BEFORE)
        assert saved.save()
    else:
        train(1)  # whatever happened before is overwritten
        assert saved.find() == []
        assert saved.state == {"epoch": 0, "step": BEFORE, "step_in_epoch": BEFORE, "totals": {}}
        saved.restore()
    seen.clear()
    train(AFTER)
    own = [np.asarray(variable) for variable in model.weights]
    with averaged.swapped_in(ranks):
        evaluated = [np.asarray(variable) for variable in model.weights]
    np.savez(
        directory / f"{what}_{ranks.rank}.npz",
        **{f"image {i}": images for i, images in enumerate(seen)},
        **{f"weight {v.path.split('/')[-1]} {i}": own[i] for i, v in enumerate(model.weights)},
        **{f"after {i}": np.asarray(variable) for i, variable in enumerate(model.weights)},
        **{f"evaluated {i}": value for i, value in enumerate(evaluated)},
        **{f"slot {i}": np.asarray(variable) for i, variable in enumerate(optimizer.variables)},
        **{f"average {i}": np.asarray(variable) for i, variable in enumerate(averaged.variables)},
    )
    ranks.close()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
