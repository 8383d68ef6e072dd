"""Tests TF_CONFIG and common/distributed/tf_distribute.py."""

import json
import socket
import threading

import pytest

from common.distributed import tf_distribute
from tests.refusal import refusal

WORKERS = {"worker": ["a:1", "b:2"]}
WITH_CHIEF = WORKERS | {"chief": ["c:3"]}


def config(cluster, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


VALID = {
    "worker 0": (config(WORKERS), ["a:1", "b:2"], 0),
    "worker 1": (config(WORKERS, index=1), ["a:1", "b:2"], 1),
    "largest port": (config({"worker": ["localhost:65535"]}), ["localhost:65535"], 0),
    "worker after a chief": (config(WITH_CHIEF, index=1), ["c:3", "a:1", "b:2"], 2),
    "chief": (config(WITH_CHIEF, kind="chief"), ["c:3", "a:1", "b:2"], 0),
    "IPv6": (config({"worker": ["[::1]:5", "[::1]:6"]}, index=1), ["[::1]:5", "[::1]:6"], 1),
}


@pytest.mark.parametrize(("text", "workers", "rank"), VALID.values(), ids=VALID)
def test_valid_tf_config_gives_workers_and_rank(text, workers, rank):
    assert tf_distribute.read_tf_config(text) == (workers, rank)


@pytest.mark.parametrize("text", [None, ""])
def test_missing_tf_config_is_refused_with_an_example(text):
    message = refusal(tf_distribute.read_tf_config, text)
    assert message.startswith("--strategy=multi_worker needs TF_CONFIG, ")
    assert ': {"cluster": ' in message and message.endswith("}")


INVALID_WORKERS = (3, [1, 2], *([first, "b:1"] for first in ("a", "a:x", "a:0", "a:65536", ":1", "b:1")))
INVALID = [
    *("{", "[]", '{"cluster": {"worker": ["a:1"]}}', config({}), config(WORKERS, kind="ps")),
    *(config({"worker": workers}) for workers in INVALID_WORKERS),
    config({"worker": ["a:1"], "ps": ["b:1"]}),
    *(config(WORKERS, index=index) for index in (2, -1, "0", True)),
]


@pytest.mark.parametrize("text", INVALID)
def test_invalid_tf_config_is_refused_in_one_line(text):
    message = refusal(tf_distribute.read_tf_config, text)
    assert message.startswith(f"TF_CONFIG={text} is not valid: ")


def test_worker_waits_until_worker_0_listens(monkeypatch):
    with socket.socket() as leader:
        leader.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{leader.getsockname()[1]}"
        monkeypatch.setattr(tf_distribute, "START_SECONDS", 0.3)
        message = refusal(tf_distribute._wait_for_leader, address)
        assert message.startswith(f"no answer at {address} ")
        monkeypatch.setattr(tf_distribute, "START_SECONDS", 60.0)
        threading.Timer(0.3, leader.listen).start()
        tf_distribute._wait_for_leader(address)
