"""Measures the order of one record file with benchmarks/record_order.py."""

import numpy as np
import pytest

from benchmarks import record_order


def test_global_shuffle_of_one_file_is_a_random_order_and_a_buffer_is_not(tmp_path):
    (file,) = record_order.write_records(tmp_path, 4000, 1)
    first, second = record_order.read_epochs([file], 4000, "global", seed=0)
    assert sorted(first) == sorted(second) == list(range(4000))
    measured = record_order.distances(np.stack([first, second]))
    drawn = [np.random.default_rng(seed).permutation(4000) for seed in (0, 1)]
    assert measured == pytest.approx(record_order.distances(np.stack(drawn)), abs=0.05)
    assert max(record_order.distances(record_order.read_epochs([file], 4000, "buffer", seed=0))) < 0.25
