"""Messages put again and again: schedules, kept in the log, of which maintenance puts what is due.

    room `periodic` of the log    name -> the terms, and when the next message is due: JSON

The message and the next moment are one commit, which what is due at the same time shares: after a crash, each moment
has one message. Moments of a schedule that passed before its turn came, since the spool was closed, its queue was full,
or much was due, have one message together.
"""

from __future__ import annotations

import json
import math
import threading
from binascii import a2b_base64, b2a_base64
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any

from qflow.config import check_name, parse_span
from qflow.durations import Duration
from qflow.errors import BrokerClosed, InvalidArgument, NotFound, QflowError
from qflow.importing import imported
from qflow.loggers import get_logger
from qflow.memory.waiting import shelter, sheltered
from qflow.message import Headers, body_bytes, decode_headers, encode_headers
from qflow.named_tuples import NamedTuple
from qflow.publishing import Kept
from qflow.queues.assembly import Insert
from qflow.queues.overflow import Decision, when_full
from qflow.queues.queue import Queue, parts_of
from qflow.queues.registry import Queues
from qflow.queues.together import Together
from qflow.spool import Spool

if TYPE_CHECKING:
    from qflow.options import Body

ROOM = "periodic"
LARGEST_BYTES = 2**20 - 100
"""As it is kept: the log takes facts of 1 MiB, and the moments that come take some bytes more."""
SHORTEST_S = 1.0
"""Maintenance looks once a second."""
SET_BACK_S = 1.0
"""A clock that goes back by less is being adjusted."""
AT_ONCE = 100
AT_ONCE_BYTES = 2**20
"""So many messages, of about so many bytes, are put in one commit; then maintenance has its turn."""
TURNING_AWAY = (Decision.DROP, Decision.DEAD_LETTER)
"""At a limit, messages that are put together are turned away together, also where some would have room."""
FIELDS = 5
"""Of a line of crontab that say when."""
LONGEST_CRON = 1000
"""Characters of them: they are read for each message, by the thread of maintenance."""
REPEATED_S = 3600.0
"""A clock that goes back by no more comes by no moment again: it was ahead for a moment, not for days."""

_logger = get_logger("qflow")


class Schedule(NamedTuple):
    """Messages that are put again and again; see `Broker.schedule`.

    Args:
        name: its name.
        queue: where they go.
        body, headers: what each of them carries; besides, headers `schedule` and `scheduled_for_s` tell why it came.
        every_s: seconds between two of them; None with `cron`.
        cron, time_zone: when, as `crontab` has it, and where.
        next_s: when the next is due, in seconds since the epoch.
        last_s: when the last one was put; None = there was none.
        trouble: why a message that is due was not put yet; empty if none is late.
    """

    name: str
    queue: str
    body: bytes
    headers: dict[str, Any]
    every_s: float | None
    cron: str | None
    time_zone: str
    next_s: float
    last_s: float | None = None
    trouble: str = ""

    def means(self, other: Schedule) -> bool:
        """Tell whether both have the same terms."""
        return self == other._replace(next_s=self.next_s, last_s=self.last_s, trouble=self.trouble)


class Periodic:
    """The schedules of a broker."""

    def __init__(self, spool: Spool, queues: Queues, together: Together) -> None:
        self._spool = spool
        self._queues = queues
        self._together = together
        self._changing = threading.RLock()
        """Held while a schedule is stored, or its message put."""
        self._latest_s = math.inf
        """The time when it was looked at last; at first any is earlier."""
        self._turn: deque[str] = deque()
        """Names of what was due when it was looked for last, and has not been tried since."""
        kept = spool.log.facts(ROOM, _logger.warning)
        self._schedules = read_schedules(
            kept, lambda problem: _logger.warning("%s: %s; it is left as it is", spool.path, problem)
        )

    def add(self, wanted: Schedule) -> Schedule:
        """Keep a schedule; one of the same terms stays as it is."""
        with self._changing:
            self._spool.check_open()
            self._queues.get(wanted.queue)
            found = self._schedules.get(wanted.name)
            if found is not None and found.means(wanted):
                return found
            kept = _encoded(wanted)
            if len(kept) > LARGEST_BYTES:
                raise InvalidArgument(
                    f"schedule {wanted.name!r} takes {len(kept)} bytes, with its body in base64, and may take "
                    f"{LARGEST_BYTES}: keep what is so large elsewhere, and put into its message where"
                )
            self._spool.log.keep_facts(ROOM, {wanted.name: kept})
            self._schedules[wanted.name] = wanted
        return wanted

    def all(self) -> list[Schedule]:
        """Return all of them, by name."""
        self._spool.check_open()
        return sorted(self._schedules.values(), key=lambda one: one.name)

    def troubles(self) -> dict[str, str]:
        """Return why messages that are due were not put, by what failed. Cost: 0.05 µs a schedule."""
        return {f"schedule {one.name!r}": one.trouble for one in list(self._schedules.values()) if one.trouble}

    def cancel(self, name: str) -> None:
        """Forget one."""
        with self._changing:
            self._spool.check_open()
            if check_name(name, "schedule") not in self._schedules:
                raise NotFound(f"there is no schedule {name!r} in {self._spool.path}")
            self._spool.log.keep_facts(ROOM, {name: None})
            self._schedules.pop(name, None)

    @property
    def now_s(self) -> float:
        """The time, as schedules have it."""
        return self._spool.clock()

    @sheltered
    def put_due(self) -> bool:
        """Put some of what is due; tell whether there is more."""
        if not self._schedules or self._spool.log.failed:
            return False
        now_s = self._spool.clock()
        if now_s < self._latest_s - SET_BACK_S:  # it was set back: nothing is to wait longer than its terms say
            with self._changing:
                for name, one in self._schedules.items():
                    self._schedules[name] = one._replace(next_s=min(one.next_s, _soonest(one, now_s)))
        self._latest_s = now_s
        some = self._some_of_turn(now_s)
        together: list[Schedule] = []
        alone: list[Schedule] = []
        for one in some:
            (alone if self._is_put_alone(one) else together).append(one)
        for one in alone if self._put(together, now_s) else some:
            self._put([one], now_s)
        return bool(self._turn)

    def _some_of_turn(self, now_s: float) -> list[Schedule]:
        """Return schedules whose turn it is: of what is due, each has one before any has the next."""
        with self._changing:
            if not self._turn:
                self._turn.extend(one.name for one in self._schedules.values() if one.next_s <= now_s)
            some: list[Schedule] = []
            size = 0
            while self._turn and len(some) < AT_ONCE and size < AT_ONCE_BYTES:
                one = self._schedules.get(self._turn.popleft())
                if one is not None:
                    some.append(one)
                    size += len(one.body) + len(encode_headers(one.headers))
        return some

    def _is_put_alone(self, one: Schedule) -> bool:
        """Tell whether a message may be refused, or turned away at a limit: then so would be all that go with it."""
        try:
            settings = self._queues.get(one.queue).settings
        except QflowError:
            return True
        decision = when_full(settings)
        is_ring = decision is Decision.MAKE_ROOM  # all that go together may be more than it takes
        return bool(one.trouble) or decision in TURNING_AWAY or is_ring

    def _put(self, some: list[Schedule], now_s: float) -> bool:
        """Put the messages of schedules, of those that are due still, in one commit; tell whether that holds.

        Where it does not, they stay due; of one alone, it is kept why.
        """
        with self._changing:
            due = [now for one in some if (now := self._schedules.get(one.name)) is not None and now.next_s <= now_s]
            try:
                self._commit(due, now_s)
            except BrokerClosed:
                raise  # what is due is due when it is opened again
            except QflowError as error:
                if len(due) == 1:
                    self._note(due[0], str(error))
                return False
        return True

    def _commit(self, due: list[Schedule], now_s: float) -> None:
        if not due:
            return
        inserts: list[Insert] = []
        after: dict[str, Schedule] = {}
        for one in due:
            after[one.name] = one._replace(next_s=following(one, now_s), last_s=one.next_s, trouble="")
            puts = parts_of(self._queues.get(one.queue)).puts
            headers = {**one.headers, "schedule": one.name, "scheduled_for_s": one.next_s}
            envelope = puts.envelope(headers, None, 0, None, None, None)
            inserts.append(Insert(puts, envelope.number, [envelope.record(one.body)]))
        kept: Any = Kept({ROOM: {name: _encoded(one) for name, one in after.items()}})
        self._together.commit(inserts, [kept], timeout=0)
        self._schedules.update(after)

    def _note(self, one: Schedule, trouble: str) -> None:
        if trouble != one.trouble:
            _logger.warning("%s: schedule %r puts its message later: %s", self._spool.path, one.name, trouble)
        self._schedules[one.name] = one._replace(trouble=trouble)


class Scheduling:
    """What `Broker` has of schedules."""

    engine: Any

    def schedule(
        self,
        name: str,
        queue: Queue | str,
        body: Body,
        *,
        every_s: Duration | None = None,
        cron: str | None = None,
        time_zone: str = "UTC",
        headers: Headers | None = None,
    ) -> Schedule:
        """Have a message put into a queue again and again, also after the spool was closed and opened.

        Moments that pass while no process owns the spool, while the queue is full, or before those of many other
        schedules were put, have one message together. One of this name with the same terms stays as it is, so a program
        may say this at each start; with others, it is replaced.

        Args:
            every_s: the time between two messages, 1 s or more; the first comes after it.
            cron: when, as `crontab` has it: `"0 3 * * *"` is at three each night. Needs `pip install cronsim`.
            time_zone: of `cron`, such as `"Europe/Berlin"`.
            headers: as `Queue.put`; `schedule` and `scheduled_for_s` are added.

        Raises:
            InvalidArgument: not just one of `every_s` and `cron` is given, or one makes no sense.
            NotFound: there is no such queue.
        Cost: a commit; then one for each message, or for up to 100 that are due together. They are put within a second
        or two of their moment, and later where many are due.
        """
        periodic: Periodic = self.engine.periodic
        own = self.engine.queues.own(queue)
        wanted = make_schedule(
            {"name": name, "queue": own.name, "body": body, "headers": headers},
            every_s=every_s,
            cron=cron,
            time_zone=time_zone,
            now_s=periodic.now_s,
        )
        return shelter(lambda: periodic.add(wanted))

    def schedules(self) -> list[Schedule]:
        """Return what is put again and again, by name."""
        return shelter(self.engine.periodic.all)

    def cancel_schedule(self, name: str) -> None:
        """Put no more messages for a schedule, and forget it. Cost: a commit. Raises NotFound: there is none."""
        shelter(lambda: self.engine.periodic.cancel(name))


def make_schedule(
    message: Mapping[str, Any], *, every_s: Duration | None, cron: str | None, time_zone: str, now_s: float
) -> Schedule:
    """Return a schedule that begins now. Raises InvalidArgument: it makes no sense."""
    if (every_s is None) == (cron is None):
        raise InvalidArgument("give a schedule every_s, such as '1h', or cron, such as '0 3 * * *': one of them")
    if every_s is not None:
        every_s = parse_span(every_s, "every_s")
        if every_s < SHORTEST_S:
            raise InvalidArgument(f"every_s must be at least {SHORTEST_S:g} s, got {every_s!r}")
    elif len(str(cron)) > LONGEST_CRON or len(str(cron).split()) != FIELDS:  # cronsim takes a sixth, for seconds
        raise _no_cron(cron)
    if cron is None and time_zone != "UTC":
        raise InvalidArgument(f"time_zone={time_zone!r:.80} is of cron: leave it out with every_s")
    made = Schedule(
        name=check_name(message["name"], "schedule"),
        queue=message["queue"],
        body=bytes(body_bytes(message["body"])),
        headers=dict(decode_headers(encode_headers(message["headers"]))),
        every_s=every_s,
        cron=cron,
        time_zone=time_zone,
        next_s=now_s,
    )
    return made._replace(next_s=following(made, now_s))


def following(one: Schedule, now_s: float) -> float:
    """Return the first moment of a schedule after now. Raises InvalidArgument: there is none."""
    if one.every_s is not None:
        return one.next_s + one.every_s * max(1, (now_s - one.next_s) // one.every_s + 1)
    zone = _zone(one.time_zone)
    try:
        cronsim = imported("cronsim")
    except ModuleNotFoundError:
        raise InvalidArgument("cron= needs the package cronsim: pip install cronsim; or give every_s=") from None
    try:
        return float(next(cronsim.CronSim(str(one.cron), datetime.fromtimestamp(now_s, zone))).timestamp())
    except (cronsim.CronSimError, StopIteration):
        raise _no_cron(one.cron) from None


def _no_cron(cron: object) -> InvalidArgument:
    return InvalidArgument(
        f"cron must be five fields as in crontab that a moment matches, such as '0 3 * * *', got {cron!r:.80}"
    )


def _soonest(one: Schedule, now_s: float) -> float:
    """Return the first moment after now that a schedule could have, whatever the clock said before.

    A moment that had its message has no other, unless the clock is set back by long before it.
    """
    if one.last_s is not None and now_s < one.last_s <= now_s + REPEATED_S:
        if one.every_s is not None:
            return one.last_s + one.every_s
        now_s = one.last_s
    if one.every_s is None:
        try:
            return following(one, now_s)
        except QflowError:  # told of when it is due
            return one.next_s
    return one.next_s - one.every_s * max(0, math.ceil((one.next_s - now_s) / one.every_s) - 1)


def _zone(name: object) -> tzinfo:
    if name == "UTC":
        return UTC
    zoneinfo = imported("zoneinfo")
    try:
        zone: tzinfo = zoneinfo.ZoneInfo(str(name))
        return zone
    except (OSError, ValueError, KeyError):
        if not zoneinfo.available_timezones():
            raise InvalidArgument("this system has no time-zone data: pip install tzdata") from None
        raise InvalidArgument(f"time_zone must be a name such as 'Europe/Berlin', got {name!r:.80}") from None


def read_schedules(kept: Mapping[str, bytes], report: Callable[[str], object]) -> dict[str, Schedule]:
    """Return the schedules that a log keeps, by name; `report` is told of those that cannot be read."""
    found: dict[str, Schedule] = {}
    for name, value in kept.items():
        try:
            found[name] = from_plain(json.loads(value))
        except (ValueError, TypeError, KeyError) as error:
            report(f"the schedule {name!r} cannot be read: {error}")
    return found


def plain(one: Schedule) -> dict[str, Any]:
    """Return a schedule as JSON has it; its body in base64."""
    return {**one._asdict(), "body": b2a_base64(one.body, newline=False).decode()}


def from_plain(said: Mapping[str, Any]) -> Schedule:
    """Return the schedule that `plain` made this of; what a later version has added is left out."""
    given = {name: value for name, value in said.items() if name in Schedule._fields}
    return Schedule(**{**given, "body": a2b_base64(said["body"])})


def _encoded(one: Schedule) -> bytes:
    return json.dumps({**plain(one), "trouble": ""}, separators=(",", ":")).encode()
