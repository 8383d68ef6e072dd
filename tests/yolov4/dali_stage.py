"""Runs one stage of a DALI graph on arrays."""

import itertools

import numpy as np
from nvidia import dali
from nvidia.dali import fn


def run_stage(define, samples: list[tuple[np.ndarray, ...]], seed=1) -> list[list[np.ndarray]]:
    """Runs a stage on a batch; `define` gets one node for each array of a sample. -> [output][sample]."""
    pipe = dali.Pipeline(batch_size=len(samples), num_threads=1, device_id=None, seed=seed, exec_dynamic=True)
    with pipe:
        columns = [list(column) for column in zip(*samples, strict=True)]
        nodes = [fn.external_source(source=itertools.repeat(c), batch=True) for c in columns]
        pipe.set_outputs(*define(*nodes))
    return [[np.array(sample) for sample in output] for output in pipe.run()]
