"""Notices that a rank has died, is frozen or is elsewhere, and ends the run with one line: who, and where.

    with Watchdog(ranks, step_timeout=600) as watchdog:
        watchdog.beat("training", epoch=epoch, step=step)  # at each step, batch of evaluation, save
        with watchdog.allow(1800):  # what takes longer than a step
            ...

A collective operation waits for every rank: when one is missing, the others fail with an error that does not
say who, or wait for ever. So each rank has a thread of its own that tells rank 0 every second where it is
(rank_channel.py), whatever the launcher and the strategy. Rank 0 judges them; the others judge only rank 0.

dead        its connection has ended: the operating system sees to that when a process goes
frozen      no line has come from it for SILENT seconds: stopped, swapping, or its machine hangs
elsewhere   its lines come, but it, or a rank that waits for it, has not beaten for the step timeout

Without a connection (a firewall) a rank watches only over itself.
"""

import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from common.errors import OtherRankError, StoppedError, UserError
from common.training import rank_places
from common.training.rank_channel import Channel, Message
from common.training.rank_places import Place

if TYPE_CHECKING:
    from common.distributed.ranks import Ranks  # brings TensorFlow, which nothing here needs

TICK = 0.2  # seconds between two looks
TELL = 1.0  # seconds between two lines of a rank
SILENT = 3.0  # seconds without a line: three have been left out
CONNECT = 20.0  # seconds until a rank gives up reaching rank 0
TAKE = 1.0  # seconds for the main thread to come and say the line itself (`verdict`)
LEAVE = 2.0  # seconds for it to end the process then
GO_ON = "the same command goes on from the last checkpoint"


class RankLostError(UserError):
    """Another rank is dead, frozen or elsewhere. The message says which, and where it last was."""


class Watchdog:
    """Watches over this rank and, by its peers, over all. All ranks make theirs together.

    The limit on a step begins with the first `beat`.

    Args:
        ranks: who this process is; used here only, not by the thread.
        step_timeout: seconds between two beats after which a rank counts as stuck; 0: it may take for ever.
        on_loss: what the loss of a rank means. exit: this process ends with code 1. report: a line is said.
    """

    def __init__(self, ranks: "Ranks", *, step_timeout: float, on_loss: str = "exit") -> None:
        if on_loss not in ("exit", "report") or step_timeout < 0:
            raise ValueError(f"on_loss={on_loss!r}, step_timeout={step_timeout}")
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._timeout, self._exits = step_timeout, on_loss == "exit"
        self._homes = ranks.gather(rank_places.home())

        # The main thread writes these, the other reads them.
        self._main = threading.get_ident()
        self._asleep = 0.0  # seconds that this process did not run at all
        self._beat = ("starting", 0, 0, self._now())
        self._begun = False  # it has beaten
        self._leave: tuple[float | None] | None = None  # inside `allow`: its seconds
        self._troubled = False  # it has met an error, and waits to hear whose
        self._taken = threading.Event()  # it ends the process itself
        self._closing = threading.Event()
        self._last_word: Message = {"bye": True}
        # The thread writes these.
        self._places: dict[int, Place] = {}  # of the ranks that are connected
        self._told = self._excused = -math.inf  # when our place was told; when somebody last had leave
        self._overdue: float | None = None  # since when
        self._reported = False
        self._line: str | None = None
        self._known = threading.Event()

        self._channel: Channel | None = None
        self._address: dict[str, Any] | None = None
        if self._world_size > 1:
            if self._rank == 0:
                self._listen()
            self._address = ranks.broadcast_object(self._address)
        self._alone = self._address is None
        self._missing = set(range(1, self._world_size)) if self._channel else set()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    # --- for the main thread ---

    def beat(self, doing: str, *, epoch: int = 0, step: int = 0) -> None:
        """This rank moves: it begins a step, a batch of evaluation, a save. Costs about a microsecond."""
        self._beat = (doing, epoch, step, self._now())
        self._begun = True

    @contextlib.contextmanager
    def allow(self, seconds: float | None = None) -> Iterator[None]:
        """Up to `seconds` (None: any time) without a beat, for this rank and for all who wait for it."""
        before, self._leave = self._leave, (seconds,)
        self._beat = (*self._beat[:3], self._now())
        try:
            yield
        finally:
            self._beat = (*self._beat[:3], self._now())
            self._leave = before

    def verdict(self, timeout: float) -> str | None:
        """Whose loss an error of a collective operation comes from, for the main thread that has met it.

        Whoever gets a line has LEAVE seconds to say it and to end the process.

        Args:
            timeout: seconds to wait; a rank that is silent counts as lost meanwhile.

        Returns:
            The line, or None where all ranks seem well.
        """
        if not self._alone:
            self._troubled = True
            self._known.wait(timeout)
            self._troubled = False
        if self._line is not None:
            self._taken.set()
        return self._line

    def close(self) -> None:
        """Takes leave of the others: what becomes of this process afterwards is no loss."""
        self._closing.set()
        deadline = time.monotonic() + 3.0
        ending = self._known.is_set  # then the thread gives this one time to end the process itself
        while self._thread.is_alive() and time.monotonic() < deadline and not (self._exits and ending()):
            self._thread.join(0.05)

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Closes. An error on this rank alone ends the others too.

        Raises:
            RankLostError: instead of an error that comes from the loss of another rank.
        """
        agreed = error is None or isinstance(error, SystemExit | StoppedError | OtherRankError)
        if agreed or not self._exits:
            self.close()
            return
        if isinstance(error, Exception) and not isinstance(error, UserError):
            line = self.verdict(LEAVE)
            if line is not None:
                self.close()
                raise RankLostError(line) from error
        reason = str(error) if isinstance(error, UserError) else f"{kind.__name__}: {error}"
        self._last_word = {"failed": reason.partition("\n")[0][:500]}
        self._taken.set()
        self.close()

    # --- the thread: listening and telling ---

    def _run(self) -> None:
        try:
            if self._rank and self._address:
                self._connect()
            self._looked = time.monotonic()
            started = self._now()
            while not self._closing.is_set():
                if self._channel:
                    heard = self._channel.poll(TICK)
                else:
                    heard = []
                    self._closing.wait(TICK)
                now = self._tick()
                for rank, message in heard:
                    self._hear(rank, message)
                if self._channel and now - self._told >= TELL:
                    self._told = now
                    self._channel.tell({"place": dataclasses.asdict(self._own(now))})
                if self._missing and now - started > CONNECT:
                    _say(f"warning: no connection from {self._names(self._missing)}: a firewall?")
                    self._missing = set()
                self._judge(now)
        except Exception as error:  # training is worth more than its watchdog
            _say(f"warning: rank {self._rank} is not watched over any more: {error!r}")
            self._alone = True
        if self._channel:
            self._channel.close(self._last_word)

    def _listen(self) -> None:
        local = len({home["network"] for home in self._homes}) == 1
        try:
            self._channel, self._address = Channel.listen(self._world_size, local=local)
        except OSError as error:
            _say(f"warning: the ranks watch only over themselves: no port to listen on: {error}")

    def _connect(self) -> None:
        try:
            self._channel = Channel.connect(self._address, self._rank, seconds=CONNECT)
        except OSError as error:
            self._alone = True
            if not self._closing.is_set():
                _say(
                    f"warning: rank {self._rank} watches only over itself: rank 0 cannot be reached: {error}"
                )

    def _now(self) -> float:
        """Seconds, less those in which this process did not run: nobody is late for a suspended job."""
        return time.monotonic() - self._asleep

    def _tick(self) -> float:
        looked, self._looked = self._looked, time.monotonic()
        asleep = self._looked - looked - TICK
        if asleep > min(SILENT, self._timeout / 2 or SILENT):
            self._asleep += asleep
        return self._now()

    def _own(self, now: float) -> Place:
        doing, epoch, step, since = self._beat
        limit = self._timeout if self._begun else None
        if self._leave:
            (limit,) = self._leave
        at, waiting = rank_places.where(self._main)
        age = max(0.0, now - since if self._leave else min(now - since, now - self._excused))
        return Place(doing, int(epoch), int(step), age, limit, bool(self._leave), at, waiting, heard=now)

    def _hear(self, rank: int, message: Message | None) -> None:
        """One message of another rank, or the end of its connection (None)."""
        place = self._places.get(rank, Place())
        if message is None or "failed" in message or "bye" in message:
            watched = rank in self._places or rank == 0
            self._forget(rank)
            if message is None and watched:
                silence = self._now() - place.heard if place.heard else 0.0
                silent = f", after {silence:.0f} s of silence" if silence > SILENT else ""
                self._lose(f"{self._names([rank])} has died{silent}; last seen: {place}")
            elif message is not None and "failed" in message:
                self._lose(f"{self._names([rank])} has ended with an error, {place}: {message['failed']}")
        elif "lost" in message:
            self._lose(**message["lost"])
        else:
            self._places[rank] = Place(**message["place"] | {"heard": self._now()})
            self._missing.discard(rank)

    def _forget(self, rank: int) -> None:
        self._places.pop(rank, None)
        if rank == 0 and self._channel:  # it was the only one to talk to
            self._channel.close(seconds=0.1)
            self._channel, self._alone = None, True

    def _names(self, ranks: Iterable[int]) -> str:
        return rank_places.names(self._homes, ranks)

    # --- the thread: judging ---

    def _judge(self, now: float) -> None:
        """Ends the run, or reports, where a rank is frozen or elsewhere."""
        if not self._timeout and not self._troubled:
            return
        places = self._places | {self._rank: self._own(now)}
        silence = {rank: now - place.heard for rank, place in places.items()}
        patience = SILENT if self._troubled else max(SILENT, self._timeout / 2)
        frozen = [rank for rank in places if silence[rank] > patience]
        if self._rank and self._channel and not frozen:
            return  # rank 0 knows better
        ages = {rank: place.age + silence[rank] for rank, place in places.items()}
        if self._troubled and frozen:
            self._lose_stuck(places, ages, frozen, silence)
        if not self._timeout:
            return

        def late(rank: int) -> bool:
            place = places[rank]
            waited = ages[rank] if place.leave else min(ages[rank], now - self._excused)
            return place.limit is not None and waited > place.limit

        judged = [0] if self._rank and self._channel else list(places)
        if any(place.leave and not late(rank) for rank, place in places.items()):
            self._excused = now  # who waits for a rank that has leave is not late either
        if not any(map(late, judged)):
            self._overdue, self._reported = None, False
            return
        self._overdue = self._overdue or now
        unsure = any(1.5 * TELL < seconds <= SILENT for seconds in silence.values())
        if not unsure or now - self._overdue > SILENT:  # else it will show whether it is frozen or elsewhere
            self._lose_stuck(places, ages, frozen, silence)

    def _lose_stuck(
        self, places: dict[int, Place], ages: dict[int, float], frozen: list[int], silence: dict[int, float]
    ) -> None:
        lost = frozen or rank_places.stragglers(places)
        longest = max(ages.values())
        if not lost:
            line = f"no rank has moved for {longest:.0f} s, and none is behind the others"
        elif frozen:
            seconds = silence[lost[0]]
            line = f"{self._names(lost)} is frozen, silent for {seconds:.0f} s; last seen: {places[lost[0]]}"
        elif ages[lost[0]] > longest / 2:
            line = f"{self._names(lost)} has not moved for {ages[lost[0]]:.0f} s: {places[lost[0]]}"
        else:  # it beats, but never comes to where the others wait
            line = f"{self._names(lost)} has kept the others waiting for {longest:.0f} s: {places[lost[0]]}"
        if not self._reported:
            _say(rank_places.table(self._homes, places, ages, lost))
            self._lose(line, lost, frozen)
        self._reported = True

    def _lose(self, line: str, stuck: Sequence[int] = (), frozen: Sequence[int] = ()) -> None:
        """A rank is lost: says so here and to the others, and ends this process (on_loss="exit")."""
        self._line = f"{line}; {GO_ON}" if self._exits and not line.endswith(GO_ON) else line
        first = not self._known.is_set()
        self._known.set()
        if self._rank == 0 and self._channel:
            lost = {"line": self._line, "stuck": list(stuck), "frozen": list(frozen)}
            self._channel.tell({"lost": lost})
        if self._rank in stuck:
            _say(f"rank {self._rank} is here:\n{rank_places.stack(self._main)}")
        for rank in frozen:
            rank_places.kill(self._homes[rank])
        if not self._exits:
            _say(self._line)
            if self._rank in stuck and first:  # a death is a loss that Horovod Elastic understands; who
                os._exit(1)  # waits for a rank that has died is not to blame
            return
        hung = bool(stuck) and not self._troubled
        deadline = time.monotonic() + (0.0 if hung else TAKE)
        while time.monotonic() < deadline and not self._taken.is_set() and not self._closing.is_set():
            self._taken.wait(0.05)
        if self._taken.is_set():
            time.sleep(LEAVE)
        elif self._closing.is_set():
            return  # it had done its work
        else:
            _say(f"error: {self._line}")
        if self._channel:
            self._channel.close(seconds=0.5)
        _patiently(sys.stdout.flush)
        os._exit(1)  # sys.exit would end this thread only


def _say(text: str) -> None:
    _patiently(lambda: print(text, file=sys.stderr, flush=True))


def _patiently(write: Callable[[], None]) -> None:
    """Waits half a second at most: a main thread that is stuck may be so in writing, and hold the lock."""
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(0.5)
