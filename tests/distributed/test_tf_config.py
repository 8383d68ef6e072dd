"""TF_CONFIG, right and wrong, and how workers meet."""

import concurrent.futures
import json
import socket
import threading

import pytest

from common.distributed import tf_config
from common.errors import UserError


def config(cluster=None, kind="worker", index=0):
    cluster = {"worker": ["a:1", "b:2"]} if cluster is None else cluster
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("text", "workers", "rank"),
    [
        (config(), ["a:1", "b:2"], 0),
        (config(index=1), ["a:1", "b:2"], 1),
        (config({"worker": ["localhost:5000"]}), ["localhost:5000"], 0),
        (config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, index=1), ["c:3", "a:1", "b:2"], 2),
        (config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, kind="chief"), ["c:3", "a:1", "b:2"], 0),
        (config({"worker": ["[::1]:5", "[::1]:6"]}, index=1), ["[::1]:5", "[::1]:6"], 1),
    ],
)
def test_the_workers_and_which_one_this_is(text, workers, rank):
    assert tf_config.read(text) == (workers, rank)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "needs TF_CONFIG"),
        ("", "needs TF_CONFIG"),
        ("{", "cannot be understood"),
        ("[]", "cannot be understood"),
        ("{}", "cannot be understood"),
        ('{"cluster": {"worker": ["a:1"]}}', "cannot be understood"),
        (config({}), "cannot be understood"),
        (config({"worker": 3}), "cannot be understood"),
        (config({"worker": [1, 2]}), "cannot be understood"),
        (config({"worker": ["a", "b"]}), "cannot be understood"),
        (config({"worker": ["a:x", "b:1"]}), "cannot be understood"),
        (config(index=2), "cannot be understood"),
        (config(kind="ps"), "cannot be understood"),
        (config(index=-1), "counts from 0"),
        (config(index="0"), "counts from 0"),
        (config(index=True), "counts from 0"),
        (config({"worker": ["a:0", "b:1"]}), "host:port"),
        (config({"worker": [":1", "b:1"]}), "host:port"),
        (config({"worker": ["a:1"], "ps": ["b:1"]}), "['ps', 'worker']"),
        (config({"worker": ["a:1", "a:1"]}), "the same address"),
    ],
)
def test_a_wrong_one_is_told_in_one_line(text, part):
    with pytest.raises(UserError) as error:
        tf_config.read(text)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def addresses(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return found


def meet(*parties, seconds=20):
    """What happens to each (workers, rank), all at the same time: None, or the message."""

    def come(party):
        try:
            return tf_config.meet(*party, seconds)
        except UserError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(come, parties))


def test_workers_meet_and_leave_their_ports_free():
    workers = addresses(3)
    for _ in range(2):  # a run is started again at once
        assert meet((workers, 2), (workers, 0), (workers, 1)) == [None] * 3
    for address in workers:
        socket.create_server(("", int(address.rpartition(":")[2]))).close()


def test_one_worker_meets_nobody():
    tf_config.meet(["nowhere:1"], 0)


def test_other_lists_are_told_to_all():
    workers = addresses(2)
    told = meet((workers, 0), ([*workers, "127.0.0.1:9"], 1))
    assert told == ["TF_CONFIG names other workers on worker 1 than on worker 0"] * 2


def test_one_index_given_twice_is_told_to_all():
    workers = addresses(3)
    told = meet((workers, 0), (workers, 1), (workers, 1))
    assert told == [f"TF_CONFIG gives two processes the index of worker 1, {workers[1]}"] * 3


def test_the_missing_are_named():
    workers = addresses(3)
    first, second = meet((workers, 0), (workers, 1), seconds=2)
    assert first == second == f"TF_CONFIG: these workers have not come: 2 ({workers[2]})"
    (alone,) = meet((workers, 1), seconds=0.5)
    assert f"worker 0 ({workers[0]}) has not come" in alone


def test_a_taken_port_is_told():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (told,) = meet(([f"127.0.0.1:{port}", "127.0.0.1:9"], 0))
    assert f"port {port} cannot be had" in told


def test_strangers_and_those_who_come_twice_do_not_matter():
    workers = addresses(3)
    host, port = workers[0].split(":")
    outcome = []
    leader = threading.Thread(target=lambda: outcome.append(tf_config.meet(workers, 0, 90)))
    leader.start()
    hello = json.dumps({"rank": 1, "workers": workers}).encode() + b"\n"
    for line in (b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b"", hello):  # the last one was killed and started anew
        while True:
            try:
                visit = socket.create_connection((host, int(port)), timeout=20)
                break
            except ConnectionRefusedError:
                assert leader.is_alive()
        with visit:
            visit.sendall(line)
    assert meet((workers, 1), (workers, 2), seconds=90) == [None, None]
    leader.join()
    assert outcome == [None]
