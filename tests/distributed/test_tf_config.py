"""Tests TF_CONFIG and common/distributed/tf_distribute.py."""

import json
import socket
import threading

import pytest

from common.distributed import tf_distribute
from tests.refusal import refusal


def config(cluster=None, kind="worker", index=0):
    cluster = {"worker": ["a:1", "b:2"]} if cluster is None else cluster
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


RIGHT = [
    (config(), ["a:1", "b:2"], 0),
    (config(index=1), ["a:1", "b:2"], 1),
    (config({"worker": ["localhost:65535"]}), ["localhost:65535"], 0),
    (config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, index=1), ["c:3", "a:1", "b:2"], 2),
    (config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, kind="chief"), ["c:3", "a:1", "b:2"], 0),
    (config({"worker": ["[::1]:5", "[::1]:6"]}, index=1), ["[::1]:5", "[::1]:6"], 1),
]


@pytest.mark.parametrize(("text", "workers", "rank"), RIGHT)
def test_valid_tf_config_gives_workers_and_rank(text, workers, rank):
    assert tf_distribute.read_tf_config(text) == (workers, rank)


@pytest.mark.parametrize("text", [None, ""])
def test_missing_tf_config_is_refused_with_an_example(text):
    log = refusal(tf_distribute.read_tf_config, text)
    assert log.startswith("--strategy=multi_worker needs TF_CONFIG, ")
    assert ': {"cluster": ' in log and log.endswith("}")


FIRST_WORKERS = ("a", "a:x", "a:0", "a:65536", ":1", "b:1")
WRONG_WORKERS = (3, [1, 2], *([first, "b:1"] for first in FIRST_WORKERS))
WRONG = ["{", "[]", '{"cluster": {"worker": ["a:1"]}}', config({}), config(kind="ps")]
WRONG += [config({"worker": workers}) for workers in WRONG_WORKERS]
WRONG += [config({"worker": ["a:1"], "ps": ["b:1"]}), *(config(index=i) for i in (2, -1, "0", True))]


@pytest.mark.parametrize("text", WRONG)
def test_invalid_tf_config_is_refused_in_one_line(text):
    assert refusal(tf_distribute.read_tf_config, text).startswith(f"TF_CONFIG={text} is not valid: ")


def test_worker_waits_until_worker_0_listens(monkeypatch):
    with socket.socket() as leader:
        leader.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{leader.getsockname()[1]}"
        monkeypatch.setattr(tf_distribute, "START_SECONDS", 0.3)
        log = refusal(tf_distribute._wait_for_leader, address)
        assert log.startswith(f"no answer at {address} ")
        monkeypatch.setattr(tf_distribute, "START_SECONDS", 60.0)
        threading.Timer(0.3, leader.listen).start()
        tf_distribute._wait_for_leader(address)
