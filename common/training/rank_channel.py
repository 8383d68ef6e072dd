"""Lines of JSON between rank 0 and each other rank, over plain TCP: no Horovod, no launcher, no TensorFlow.

    channel, address = Channel.listen(world_size, local=True)       # rank 0; the address goes to the others
    channel = Channel.connect(address, rank, seconds=20)            # every other rank
    for rank, message in channel.poll(0.2): ...                     # None: that rank's connection ended
    channel.tell({"step": 7})                                       # rank 0: to all; another rank: to rank 0

A rank that is killed is noticed by the connection's end, which the operating system sees to. Nothing here
waits for a peer that does not read. Whoever does not know the token is not listened to.
"""

import contextlib
import dataclasses
import fcntl
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from typing import Any

Message = dict[str, Any]

MAX_LINE = 8192  # bytes; a rank's own lines have some 200
MAX_STRANGERS = 64  # connections that have not shown the token yet
STRANGER_SECONDS = 5.0  # for showing it
ATTEMPT_SECONDS = 5.0  # for one of rank 0's addresses
LOST_SECONDS = 60  # without any answer from the other machine: it is off, or its cable out
SIOCGIFADDR = 0x8915  # Linux, <linux/sockios.h>: the IPv4 address of an interface


@dataclasses.dataclass(eq=False)
class _Connection:
    socket: socket.socket
    rank: int | None = None  # None: a stranger
    met: bool = False  # it has spoken since it was let in
    received: bytes = b""
    unsent: bytes = b""
    since: float = dataclasses.field(default_factory=time.monotonic)


class Channel:
    """The connections of one rank; made by `listen` or `connect`. To be used by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: list[_Connection] = []
        self._listener: socket.socket | None = None
        self._address: dict[str, Any] = {}
        self._world_size = 0

    @classmethod
    def listen(cls, world_size: int, *, local: bool) -> tuple["Channel", dict[str, Any]]:
        """Rank 0's side.

        Args:
            world_size: number of ranks.
            local: all ranks share this machine's loopback interface; no other is then listened on.

        Returns:
            The channel, and what the others need to connect.

        Raises:
            OSError: no port can be had.
        """
        channel = cls()
        backlog = world_size + MAX_STRANGERS
        if local:
            channel._listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        elif socket.has_dualstack_ipv6():
            channel._listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        else:
            channel._listener = socket.create_server(("", 0), backlog=backlog)
        channel._listener.setblocking(False)
        channel._selector.register(channel._listener, selectors.EVENT_READ)
        channel._world_size = world_size
        channel._address = {
            "hosts": ["127.0.0.1"] if local else _own_addresses(),
            "port": channel._listener.getsockname()[1],
            "token": secrets.token_hex(16),
            "answer": secrets.token_hex(16),
        }
        return channel, channel._address

    @classmethod
    def connect(cls, address: dict[str, Any], rank: int, *, seconds: float) -> "Channel":
        """Another rank's side; tries each of rank 0's addresses until one answers as rank 0 would.

        Raises:
            OSError: none did within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            for host in address["hosts"]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"no answer at port {address['port']} of {', '.join(address['hosts'])}"
                    )
                with contextlib.suppress(OSError, ValueError):
                    return cls._connected(host, address, rank, min(left, ATTEMPT_SECONDS))
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))

    @classmethod
    def _connected(cls, host: str, address: dict[str, Any], rank: int, seconds: float) -> "Channel":
        to_zero = socket.create_connection((host, address["port"]), timeout=seconds)
        try:
            to_zero.sendall(_line({"token": address["token"], "rank": rank}))
            received = b""
            while b"\n" not in received:
                more = to_zero.recv(MAX_LINE)
                received += more
                if not more or len(received) > MAX_LINE:
                    raise ConnectionError("something else listens there")
            answer, _, received = received.partition(b"\n")
            if not _same(json.loads(answer), "answer", address["answer"]):
                raise ConnectionError("something else listens there")
        except BaseException:
            to_zero.close()
            raise
        channel = cls()
        connection = channel._add(to_zero)
        connection.rank, connection.met, connection.received = 0, True, received
        return channel

    def poll(self, seconds: float) -> list[tuple[int, Message | None]]:
        """Waits up to `seconds` for something to come.

        Returns:
            (rank, message) in the order they came; the message is None where the connection has ended.
        """
        heard: list[tuple[int, Message | None]] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._let_in()
            elif key.data in self._connections:  # not dropped while this list was gone through
                self._read(key.data, heard)
        for connection in [c for c in self._connections if c.rank is None]:
            if time.monotonic() - connection.since > STRANGER_SECONDS:
                self._drop(connection)
        return heard

    def tell(self, message: Message) -> None:
        """Sends to everybody connected. A peer that does not read misses messages; nobody waits for it."""
        line = _line(message)
        for connection in self._connections:
            if connection.rank is not None:
                self._send(connection, line)

    def close(self, last: Message | None = None, *, seconds: float = 1.0) -> None:
        """Sends `last`, waits a little until the others have it (have hung up), and hangs up."""
        if last is not None:
            self.tell(last)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
            if connection.rank is None:
                self._drop(connection)
        deadline = time.monotonic() + seconds
        while self._connections and time.monotonic() < deadline:
            self.poll(0.05)  # unread bytes at the time of closing would reset the connection: `last` is lost
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()

    def _add(self, peer: socket.socket) -> _Connection:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", LOST_SECONDS // 2),
            ("TCP_KEEPINTVL", LOST_SECONDS // 6),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 1000 * LOST_SECONDS),
        ):
            with contextlib.suppress(OSError, AttributeError):  # a finer point: not every system has them
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection = _Connection(peer)
        self._connections.append(connection)
        self._selector.register(peer, selectors.EVENT_READ, connection)
        return connection

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # nobody else waits
            while True:
                stranger, _ = self._listener.accept()
                if sum(c.rank is None for c in self._connections) < MAX_STRANGERS:
                    self._add(stranger)
                else:
                    stranger.close()

    def _read(self, connection: _Connection, heard: list[tuple[int, Message | None]]) -> None:
        """Appends to `heard` what has come from one connection, and its end."""
        messages, ended = [], False
        try:
            more = connection.socket.recv(65536)
            *lines, connection.received = (connection.received + more).split(b"\n")
            ended = not more or len(connection.received) > MAX_LINE
            messages = [json.loads(line) for line in lines if len(line) <= MAX_LINE]
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):
            ended = True
        for message in messages:
            if connection.rank is None:
                if not self._admit(connection, message):
                    ended = True
                    break
            elif isinstance(message, dict):
                connection.met = True
                heard.append((connection.rank, message))
        if ended:
            self._drop(connection)
            if connection.met:
                heard.append((connection.rank, None))

    def _admit(self, connection: _Connection, hello: Any) -> bool:
        """Whether a stranger's first line shows it to be a missing rank; it is then answered."""
        if not _same(hello, "token", self._address["token"]):
            return False
        rank = hello.get("rank")
        if type(rank) is not int or not 0 < rank < self._world_size:
            return False
        for other in [c for c in self._connections if c.rank == rank]:
            if other.met:
                return False
            self._drop(other)  # it gave up waiting for the answer, and came again
        connection.rank = rank
        self._send(connection, _line({"answer": self._address["answer"]}))
        return True

    def _send(self, connection: _Connection, line: bytes) -> None:
        if len(connection.unsent) < MAX_LINE:
            connection.unsent += line
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            return
        except OSError:
            return  # `poll` sees the end of this connection, and says whose it is
        connection.unsent = connection.unsent[sent:]


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _same(message: Any, key: str, secret: str) -> bool:
    given = message.get(key) if isinstance(message, dict) else None
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _own_addresses() -> list[str]:
    """Names and IPv4 addresses under which other machines may know this one, the likeliest first."""
    found = [os.environ.get("HOROVOD_HOSTNAME", ""), socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", interface.encode()[:15])
                reply = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))  # struct ifreq: name, family, port, address
    return [host for host in dict.fromkeys(found) if host and not host.startswith("127.")]
