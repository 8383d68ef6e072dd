import ctypes
import functools
import itertools
import re
import signal
import sys
import types

import horovod
import msgspec
import numpy as np
import pytest
import tensorflow as tf

from common.distributed.horovod import HorovodRanks
from common.distributed.start import start
from common.errors import UserError
from tests.distributed import launching, steps_on_ranks

TIMEOUT = 200
TF_DISTRIBUTE = ("mirrored", "multi_worker")
STRATEGIES = (*TF_DISTRIBUTE, "horovod")
# Batch norms are frozen. tf.distribute takes the same steps on a CPU and on a GPU.
FROZEN = [*itertools.product(("adam", "accumulated"), STRATEGIES), ("accumulated_on_gpu", "horovod")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function results(strategy) that returns what steps_on_ranks.py wrote, for each rank."""

    @functools.cache
    def run(strategy):
        output = tmp_path_factory.mktemp(strategy)
        if strategy == "none":
            steps_on_ranks.main(strategy, output)
        else:
            words = [steps_on_ranks.__file__, strategy, output]
            for result in launching.run_two_replicas(strategy, words, timeout=TIMEOUT):
                assert not re.search(r"\brank\b|^(.*>:)?(error|warning)", result.stderr, re.MULTILINE)
        files = sorted(output.glob("*.msgpack"))
        return [msgspec.msgpack.decode(file.read_bytes()) for file in files]

    return run


def replicas(ranks, case, kind):
    """Returns each variable's values on all replicas, (replicas, ...)."""
    return [np.concatenate(parts) for parts in zip(*(rank[case][kind] for rank in ranks), strict=True)]


# --- training steps ---


@pytest.mark.parametrize(("case", "strategy"), FROZEN)
def test_ten_steps_of_two_replicas_equal_those_of_one_process_with_both_batches(results, case, strategy):
    (expected,), ranks = results("none"), results(strategy)
    for rank in ranks:
        assert rank[case]["updates"] == expected[case]["updates"]
    for kind in ("weights", "averages", "slots"):
        expected_variables = replicas([expected], case, kind)
        assert expected_variables
        for variable, value in zip(replicas(ranks, case, kind), expected_variables, strict=True):
            assert len(variable) == 2
            assert np.array_equal(variable[0], variable[1]), f"{kind}: the replicas differ"
            np.testing.assert_allclose(variable[0], value[0], rtol=1e-5, atol=1e-5, err_msg=kind)
    np.testing.assert_allclose(ranks[0][case]["losses"], expected[case]["losses"], rtol=1e-5)


def test_accumulated_gradients_update_the_weights_every_second_step(results):
    (rank,) = results("none")
    updates = {case: rank[case]["updates"] for case in ("adam", "accumulated", "accumulated_on_gpu")}
    assert updates == {"adam": 10, "accumulated": 5, "accumulated_on_gpu": 5}
    assert rank["accumulated"]["loss_scale"] == [2**15]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overflow_halves_the_loss_scale_on_all_replicas_and_keeps_the_weights(results, strategy):
    (expected,) = results("none")
    for rank in results(strategy):
        overflow = rank["overflow"]
        assert overflow["finite"] == [True]  # the loss is finite, but not the scaled gradients
        assert overflow["updates"] == 0
        assert overflow["loss_scale"] and set(overflow["loss_scale"]) == {float(np.float32(3e38) / 2)}
        for replicas_of_rank, value in zip(overflow["weights"], expected["overflow"]["weights"], strict=True):
            assert all(np.array_equal(replica, value[0]) for replica in replicas_of_rank)


@pytest.mark.parametrize("case", ["statistics", "statistics_on_gpu"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_that_is_not_finite_on_one_replica_changes_no_replica(results, strategy, case):
    ranks = results(strategy)
    for rank in ranks:
        assert rank[case]["finite"] == [True] * 5 + [False] + [True] * 4
        assert rank[case]["updates"] == 9
        assert rank[case]["before"] == rank[case]["after"]
        for values in rank[case]["before"].values():
            assert values and all(np.isfinite(value).all() for value in values)
    for values in replicas(ranks, case, "weights"):
        assert np.array_equal(values[0], values[1])
        assert np.isfinite(values).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averaging_batch_norm_statistics_over_replicas_returns_the_mean_and_changes_no_replica(
    results, strategy
):
    ranks = results(strategy)
    statistics = replicas(ranks, "statistics", "statistics")
    for values in [*statistics, *replicas(ranks, "statistics", "average_statistics")]:
        assert len(values) == 2
        assert not np.allclose(values[0], values[1], atol=1e-3)
    for rank in ranks:
        for mean, values in zip(rank["statistics"]["mean_statistics"], statistics, strict=True):
            np.testing.assert_allclose(mean, values.mean(0), rtol=1e-6, atol=1e-7)
    statistics_after = replicas(ranks, "statistics", "statistics_after_mean")
    for before, after in zip(statistics, statistics_after, strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averages_are_swapped_in_equal_on_all_replicas_and_swapped_out_bit_for_bit(results, strategy):
    ranks = results(strategy)
    for rank in ranks:
        swapped_in, swapped_out = (rank["statistics"][name] for name in ("swapped_in", "swapped_out"))
        assert swapped_in["weights"] == rank["statistics"]["averages"]
        means = [np.mean(values, axis=0) for values in replicas(ranks, "statistics", "average_statistics")]
        for values, mean in zip(swapped_in["statistics"], means, strict=True):
            for value in values:
                np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-7)
        assert swapped_out == {name: rank["statistics"][name] for name in swapped_out}


@pytest.mark.parametrize("strategy", TF_DISTRIBUTE)
def test_tf_distribute_and_horovod_agree_on_each_replica_with_batch_statistics(results, strategy):
    ranks, expected = results(strategy), results("horovod")
    for kind in ("weights", "averages", "statistics", "average_statistics"):
        variables, references = replicas(ranks, "statistics", kind), replicas(expected, "statistics", kind)
        for variable, reference in zip(variables, references, strict=True):
            np.testing.assert_allclose(variable, reference, rtol=1e-5, atol=1e-5, err_msg=kind)
    outputs, expected_outputs = (each[0]["statistics"]["outputs"] for each in (ranks, expected))
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)


def test_gradients_averaged_by_horovod_with_compression_are_float32_with_float16_precision(results):
    for compression in (rank["compression"] for rank in results("horovod")):
        plain, compressed = compression["plain"], compression["compressed"]
        np.testing.assert_allclose(plain[0], np.full((2, 3), 5 / 6), rtol=1e-6)
        np.testing.assert_allclose(plain[1], [0.5, -1, 1e-3], rtol=1e-6)
        assert compression["dtypes"] == ["float32", "float32"]
        for half, single in zip(compressed, plain, strict=True):
            np.testing.assert_allclose(half, single, rtol=2**-10)
        first = np.array(compressed[0])
        assert (first != plain[0]).all()
        assert (first.astype(np.float16) == first).all()


# --- messages between ranks ---


# rank, local rank, number of ranks, number of replicas, local replicas
PLACES = [
    ("none", [[0, 0, 1, 1, 0]]),
    ("mirrored", [[0, 0, 1, 2, 0, 1]]),
    ("multi_worker", [[0, 0, 2, 2, 0], [1, 1, 2, 2, 1]]),
    ("horovod", [[0, 0, 2, 2, 0], [1, 1, 2, 2, 1]]),
]


@pytest.mark.parametrize(("strategy", "places"), PLACES)
def test_each_rank_has_its_own_rank_local_rank_world_size_and_replicas(results, strategy, places):
    ranks = [rank["messages"] for rank in results(strategy)]
    assert [rank["place"] for rank in ranks] == places
    assert [rank["strategy"] for rank in ranks] == [strategy] * len(places)


@pytest.mark.parametrize("strategy", ["none", *STRATEGIES])
def test_each_rank_gets_the_messages_of_all_ranks_and_the_variables_of_rank_0(results, strategy):
    ranks = results(strategy)
    messages = [{"rank": i, "bytes": bytes([i]) * (5 + 1_000_003 * i)} for i in range(len(ranks))]
    for number, rank in enumerate(rank["messages"] for rank in ranks):
        assert rank["gathered"] == messages
        assert rank["gathered_texts"] == [None, {"blue": "\N{WHALE}", "b": [1.5]}][: len(ranks)]
        assert rank["broadcast_object"] == 0
        assert rank["no_variables"] == []
        assert rank["first_on_host"] == [f"trace{i}" for i in range(number)]
        for values, value in zip(rank["after_broadcast"], (11, 17), strict=True):
            assert np.all(np.equal(values, value))
    before = replicas(ranks, "messages", "before_broadcast")[0]
    assert strategy == "none" or not np.array_equal(before[0], before[1])


@pytest.mark.parametrize("strategy", ["multi_worker", "horovod"])
def test_user_error_of_rank_1_is_raised_on_both_ranks(results, strategy):
    errors = [tuple(rank["messages"]["error"]) for rank in results(strategy)]
    message = "--batch_size=0 is none"
    assert errors == [("OtherRankError", f"rank 1: {message}"), ("UserError", message)]


@pytest.mark.parametrize("strategy", ["multi_worker", "horovod"])
def test_loader_that_rank_1_cannot_open_for_the_second_epoch_ends_both_ranks(results, strategy):
    errors = [tuple(rank["messages"]["opening_error"]) for rank in results(strategy)]
    assert errors == [("OtherRankError", "rank 1: image.jpg is gone"), ("UserError", "image.jpg is gone")]


def test_sigterm_ends_a_worker_of_tf_distribute(results):
    """TensorFlow's preemption notifier would catch SIGTERM."""
    for rank in results("multi_worker"):
        assert rank["messages"]["exit_code_after_sigterm"] == -signal.SIGTERM


# --- starting ---


@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_several_processes_of_horovodrun_without_its_strategy_are_refused(monkeypatch, strategy):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(UserError, match="horovodrun started 2 processes: add --strategy=horovod"):
        start(strategy)


def test_missing_horovod_is_refused_with_the_command_to_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    with pytest.raises(UserError, match=r"^--strategy=horovod needs Horovod .*run `make horovod`$"):
        start("horovod")


def test_horovod_chooses_the_gpu_before_tensorflow_runs_anything(monkeypatch):
    calls = []
    gpus = [types.SimpleNamespace(name=f"/physical_device:GPU:{i}") for i in range(4)]
    visible = list(gpus)
    hvd = types.SimpleNamespace(
        init=lambda: calls.append("init"),
        **dict.fromkeys(("rank", "local_size", "nccl_built"), lambda: 0),
        size=lambda: calls.append("size") or 4,
        Compression=types.SimpleNamespace(none=None),
    )

    def choose(gpu, kind):
        calls.append(f"only {gpu.name[-1]}")
        visible[:] = [gpu]

    monkeypatch.setitem(sys.modules, "horovod.tensorflow", hvd)
    monkeypatch.setattr(horovod, "tensorflow", hvd, raising=False)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
    monkeypatch.setattr(tf.config, "set_visible_devices", choose)
    growth = tf.config.experimental, "set_memory_growth"
    monkeypatch.setattr(*growth, lambda gpu, on: calls.append(f"growth {gpu.name[-1]}"))
    hvd.local_rank = lambda: 2
    assert start("horovod").gpu_number(0) == 2
    assert calls == [*(f"growth {i}" for i in range(4)), "init", "only 2", "size"]
    hvd.local_rank = lambda: 0
    assert start("horovod").gpu_number(0) == 2
    visible[:], hvd.local_size = gpus, lambda: 5
    with pytest.raises(UserError, match="5 ranks on this host, but 4 GPUs: start one rank per GPU"):
        start("horovod")


@pytest.fixture
def driver(monkeypatch):
    """A driver of a GPU, and a Horovod with two ranks, NCCL and this GPU."""
    functions = dict.fromkeys(("rank", "local_rank"), lambda: 0) | dict.fromkeys(
        ("size", "local_size", "nccl_built"), lambda: 2
    )
    compression = types.SimpleNamespace(none=None)
    hvd = types.SimpleNamespace(init=lambda: None, Compression=compression, **functions)
    gpu = types.SimpleNamespace(name="/physical_device:GPU:0")

    def write_address(buffer, size, device) -> int:
        buffer.value = b"0000:3b:00.0"
        return 0

    driver = types.SimpleNamespace(
        cuInit=lambda _: 0, cuDeviceGet=lambda *_: 0, cuDeviceGetPCIBusId=write_address
    )
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", hvd)
    monkeypatch.setattr(horovod, "tensorflow", hvd, raising=False)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return driver


def test_ranks_that_share_a_gpu_are_refused_with_nccl(driver, monkeypatch):
    """With NCCL, which is not built here, Horovod would fail at its first all-reduce."""
    addresses = ["0000:3b:00.0"]
    monkeypatch.setattr(
        HorovodRanks,
        "gather",
        lambda ranks, value: [value, value[:1] + addresses if isinstance(value, list) else None],
    )
    with pytest.raises(UserError, match=r"^the ranks 0, 1 use the same GPU 0000:3b:00\.0: start one rank"):
        HorovodRanks()
    addresses[:] = ["0000:5e:00.0"]
    assert HorovodRanks().world_size == 2


@pytest.mark.parametrize("problem", ["no driver", "driver with an error"])
def test_ranks_start_with_a_line_of_log_if_the_driver_does_not_tell_the_gpu(
    driver, monkeypatch, capsys, problem
):
    def fail(name):
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    if problem == "no driver":
        monkeypatch.setattr(ctypes, "CDLL", fail)
    driver.cuInit = lambda _: 3  # CUDA_ERROR_NOT_INITIALIZED
    monkeypatch.setattr(HorovodRanks, "gather", lambda ranks, value: [value, value])
    assert HorovodRanks().world_size == 2
    assert capsys.readouterr().err.count("CUDA's driver does not tell which GPU this is") == 1
