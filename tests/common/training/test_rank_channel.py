"""The connections themselves, both ends in this process."""

import json
import socket
import threading

import pytest

from common.training import rank_channel
from common.training.rank_channel import Channel


@pytest.fixture
def zero():
    """Rank 0's channel of three ranks, and its address."""
    channel, address = Channel.listen(3, local=True)
    yield channel, address
    channel.close(seconds=0)


def join(channel, address, rank):
    """Connects a rank while rank 0 polls. Returns the rank's channel, or the error."""
    result = []

    def connect():
        try:
            result.append(Channel.connect(address, rank, seconds=1))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    while thread.is_alive():
        channel.poll(0.02)
    return result[0]


def heard(channel, seconds=2.0):
    """The first thing that comes."""
    for _ in range(int(seconds / 0.02)):
        if messages := channel.poll(0.02):
            return messages
    return []


def test_lines_go_both_ways_and_ends_are_told(zero):
    channel, address = zero
    one, two = join(channel, address, 1), join(channel, address, 2)
    one.tell({"step": 1})
    assert heard(channel) == [(1, {"step": 1})]
    channel.tell({"to": "all"})
    assert heard(one) == heard(two) == [(0, {"to": "all"})]
    one.close({"bye": True}, seconds=0)
    assert heard(channel) + heard(channel) == [(1, {"bye": True}), (1, None)]
    two.close(seconds=0)  # it has never spoken: nobody knew it
    assert heard(channel, 0.2) == []


@pytest.mark.parametrize(
    "wrong",
    [{"token": "0" * 32}, {"answer": "0" * 32}],
    ids=["who does not know the token", "who does not know the answer"],
)
def test_neither_side_talks_with(zero, wrong):
    channel, address = zero
    assert isinstance(join(channel, address | wrong, 1), TimeoutError)
    one = join(channel, address, 1)  # the place is still free for the right one
    one.tell({"step": 1})
    assert heard(channel) == [(1, {"step": 1})]
    one.close(seconds=0)


def test_a_rank_that_gave_up_waiting_may_come_again_but_not_twice(zero):
    channel, address = zero
    hello = json.dumps({"token": address["token"], "rank": 1}).encode() + b"\n"
    with socket.create_connection(("127.0.0.1", address["port"])) as early:
        early.sendall(hello)
        while not [c for c in channel._connections if c.rank == 1]:
            channel.poll(0.02)
        one = join(channel, address, 1)
        one.tell({"step": 1})
        assert heard(channel) == [(1, {"step": 1})]
    assert isinstance(join(channel, address, 1), TimeoutError)
    one.tell({"step": 2})
    assert heard(channel) == [(1, {"step": 2})]
    one.close(seconds=0)


def test_nobody_waits_for_a_peer_that_does_not_read(zero):
    channel, address = zero
    one = join(channel, address, 1)
    big = {"text": "x" * 4000}
    for _ in range(5000):  # 20 MB: more than any buffer between them
        channel.tell(big)
    (connection,) = channel._connections
    assert 0 < len(connection.unsent) < 2 * rank_channel.MAX_LINE
    count = 0
    while messages := heard(one, 0.3):
        assert all(message == big for _, message in messages)  # lines are left out, never cut
        count += len(messages)
    assert 0 < count < 5000
    one.close(seconds=0)


def test_a_line_without_end_ends_the_connection(zero):
    channel, address = zero
    one = join(channel, address, 1)
    one.tell({"step": 1})
    assert heard(channel) == [(1, {"step": 1})]
    (connection,) = one._connections
    connection.socket.setblocking(True)
    connection.socket.sendall(b"x" * (rank_channel.MAX_LINE + 1))
    assert heard(channel) == [(1, None)]
    one.close(seconds=0)


def test_ranks_of_several_machines_are_given_names_and_addresses():
    channel, address = Channel.listen(2, local=False)
    assert socket.gethostname() in address["hosts"]
    assert not any(host.startswith("127.") for host in address["hosts"])
    one = join(channel, address | {"hosts": ["no.such.host.invalid", "127.0.0.1"]}, 1)
    one.tell({"step": 1})
    assert heard(channel) == [(1, {"step": 1})]
    one.close(seconds=0)
    channel.close(seconds=0)
