import functools
import re
import signal
import sys
import types

import horovod
import msgspec
import numpy as np
import pytest
import tensorflow as tf

from common.distributed.start import start
from common.errors import UserError
from tests.distributed import launching, steps_on_ranks

TIMEOUT = 200
FROZEN = ("adam", "accumulated", "accumulated_on_gpu")
TF_DISTRIBUTE = ("mirrored", "multi_worker")
STRATEGIES = (*TF_DISTRIBUTE, "horovod")


@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_several_processes_of_horovodrun_without_its_strategy_are_refused(monkeypatch, strategy):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(UserError, match="horovodrun started 2 processes: add --strategy=horovod"):
        start(strategy)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Gives results(strategy), the results of each rank."""

    @functools.cache
    def of(strategy):
        output = tmp_path_factory.mktemp(strategy)
        if strategy == "none":
            steps_on_ranks.main(strategy, output)
        else:
            words = [steps_on_ranks.__file__, strategy, output]
            for result in launching.run_two_replicas(strategy, words, timeout=TIMEOUT):
                assert not re.search(r"\brank\b|^(.*>:)?(error|warning)", result.stderr, re.MULTILINE)
        files = sorted(output.glob("*.msgpack"))
        return [msgspec.msgpack.decode(file.read_bytes()) for file in files]

    return of


def replicas(ranks, case, what):
    """Returns each variable's values on all replicas, (replicas, ...)."""
    return [np.concatenate(parts) for parts in zip(*(rank[case][what] for rank in ranks), strict=True)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", FROZEN)
def test_ten_steps_of_two_replicas_equal_those_of_one_process_with_both_batches(results, case, strategy):
    alone, together = results("none"), results(strategy)
    assert [rank[case]["updates"] for rank in together] == [alone[0][case]["updates"]] * len(together)
    for what in ("weights", "averages", "slots"):
        ones, twos = replicas(alone, case, what), replicas(together, case, what)
        assert len(ones) == len(twos) > 0
        for one, two in zip(ones, twos, strict=True):
            assert len(two) == 2
            assert np.array_equal(two[0], two[1]), f"{what}: the replicas have drifted apart"
            np.testing.assert_allclose(two[0], one[0], rtol=1e-5, atol=1e-5, err_msg=what)
    np.testing.assert_allclose(together[0][case]["losses"], alone[0][case]["losses"], rtol=1e-5)


def test_accumulated_gradients_update_the_weights_every_second_step(results):
    (alone,) = results("none")
    assert [alone[case]["updates"] for case in FROZEN] == [10, 5, 5]
    assert alone["accumulated"]["loss_scale"] == [2**15]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overflow_halves_the_loss_scale_on_all_replicas_and_keeps_the_weights(results, strategy):
    (alone,) = results("none")
    for rank in results(strategy):
        seen = rank["overflow"]
        assert seen["finite"] == [True]  # the loss is finite, but not the scaled gradients
        assert np.array_equal(seen["loss_scale"], np.full(len(seen["loss_scale"]), np.float32(3e38) / 2))
        assert seen["updates"] == 0
        for mine, theirs in zip(seen["weights"], alone["overflow"]["weights"], strict=True):
            assert all(np.array_equal(copy, theirs[0]) for copy in mine)


@pytest.mark.parametrize("case", ["statistics", "statistics_on_gpu"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_that_is_not_finite_on_one_replica_changes_no_replica(results, strategy, case):
    ranks = results(strategy)
    for rank in ranks:
        seen = rank[case]
        assert seen["finite"] == [True] * 5 + [False] + [True] * 4
        assert seen["updates"] == 9
        assert seen["before"] == seen["after"]
        for values in seen["before"].values():
            assert values and all(np.isfinite(value).all() for value in values)
    for values in replicas(ranks, case, "weights"):
        assert np.array_equal(values[0], values[1])
        assert np.isfinite(values).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mean_of_moving_statistics_over_replicas_leaves_each_replicas_own_unchanged(results, strategy):
    ranks = results(strategy)
    local = replicas(ranks, "statistics", "statistics")
    for values in [*local, *replicas(ranks, "statistics", "average_statistics")]:
        assert len(values) == 2
        assert not np.allclose(values[0], values[1], atol=1e-3)
    for rank in ranks:
        for mean, values in zip(rank["statistics"]["mean_statistics"], local, strict=True):
            np.testing.assert_allclose(mean, values.mean(0), rtol=1e-6, atol=1e-7)
    for before, after in zip(local, replicas(ranks, "statistics", "statistics_after_mean"), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("strategy", TF_DISTRIBUTE)
def test_tf_distribute_and_horovod_agree_on_each_replica_with_batch_statistics(results, strategy):
    ranks, horovod = results(strategy), results("horovod")
    for what in ("weights", "averages", "statistics", "average_statistics"):
        pairs = zip(replicas(ranks, "statistics", what), replicas(horovod, "statistics", what), strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5, err_msg=what)
    outputs = [each[0]["statistics"]["outputs"] for each in (ranks, horovod)]
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)


def test_compressed_gradients_are_float32_with_the_precision_of_float16(results):
    for seen in (rank["compression"] for rank in results("horovod")):
        np.testing.assert_allclose(seen["full"][0], np.full((2, 3), 5 / 6), rtol=1e-6)
        np.testing.assert_allclose(seen["full"][1], [0.5, -1, 1e-3], rtol=1e-6)
        assert seen["dtypes"] == ["float32", "float32"]
        for half, full in zip(seen["squeezed"], seen["full"], strict=True):
            np.testing.assert_allclose(half, full, rtol=2**-10)
        first = np.array(seen["squeezed"][0])
        assert (first != seen["full"][0]).all()
        assert (first.astype(np.float16) == first).all()


PLACES = [
    ("none", [[0, 0, 1, 1, 0]]),
    ("mirrored", [[0, 0, 1, 2, 0, 1]]),
    ("multi_worker", [[0, 0, 2, 2, 0], [1, 1, 2, 2, 1]]),
    ("horovod", [[0, 0, 2, 2, 0], [1, 1, 2, 2, 1]]),
]


@pytest.mark.parametrize(("strategy", "who"), PLACES)
def test_each_rank_has_its_place_and_the_messages_of_all_ranks(results, strategy, who):
    ranks = results(strategy)
    assert [list(rank["messages"]["who"]) for rank in ranks] == who
    size = len(who)
    problem = {
        0: ("OtherRankError", "rank 1: --batch_size=0 is none"),
        1: ("UserError", "--batch_size=0 is none"),
    }
    for number, rank in enumerate(rank["messages"] for rank in ranks):
        assert rank["strategy"] == strategy
        sent = [{"rank": i, "bytes": bytes([i]) * (5 + 1_000_003 * i)} for i in range(size)]
        assert rank["gathered"] == sent
        assert rank["gathered_texts"] == [None, {"blue": "\N{WHALE}", "b": [1.5]}][:size]
        assert rank["broadcast_object"] == 0
        assert rank["no_variables"] == []
        assert rank["first_on_host"] == [f"trace{i}" for i in range(number)]
        assert rank["problem"] == (list(problem[number]) if size == 2 else None)
        for values, value in zip(rank["after_broadcast"], (11, 17), strict=True):
            assert np.all(np.equal(values, value))
    before = replicas(ranks, "messages", "before_broadcast")[0]
    assert strategy == "none" or not np.array_equal(before[0], before[1])


def test_sigterm_ends_a_worker_of_tf_distribute(results):
    """TensorFlow's preemption notifier would catch SIGTERM."""
    for rank in results("multi_worker"):
        assert not int(rank["messages"]["caught_signals"], 16) & 1 << (signal.SIGTERM - 1)


def test_missing_horovod_is_refused_with_the_command_to_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    with pytest.raises(UserError, match=r"^--strategy=horovod needs Horovod .*run `make horovod`$"):
        start("horovod")


def test_horovod_chooses_the_gpu_before_tensorflow_runs_anything(monkeypatch):
    calls = []
    gpus = [types.SimpleNamespace(name=f"/physical_device:GPU:{i}") for i in range(4)]
    seen = list(gpus)
    hvd = types.SimpleNamespace(
        init=lambda: calls.append("init"),
        **dict.fromkeys(("rank", "local_size"), lambda: 0),
        size=lambda: calls.append("size") or 4,
        Compression=types.SimpleNamespace(none=None),
    )

    def choose(gpu, kind):
        calls.append(f"only {gpu.name[-1]}")
        seen[:] = [gpu]

    monkeypatch.setitem(sys.modules, "horovod.tensorflow", hvd)
    monkeypatch.setattr(horovod, "tensorflow", hvd, raising=False)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: seen)
    monkeypatch.setattr(tf.config, "set_visible_devices", choose)
    growth = tf.config.experimental, "set_memory_growth"
    monkeypatch.setattr(*growth, lambda gpu, on: calls.append(f"growth {gpu.name[-1]}"))
    hvd.local_rank = lambda: 2
    assert start("horovod").gpu_number(0) == 2
    assert calls == [*(f"growth {i}" for i in range(4)), "init", "only 2", "size"]
    hvd.local_rank = lambda: 0
    assert start("horovod").gpu_number(0) == 2
