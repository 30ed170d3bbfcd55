"""What all requests of a door share: the broker, who may log in, who has, the figures, and what has happened lately."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from qflow import doctor
from qflow.aio.broker import AsyncBroker, at_a_glance, at_length
from qflow.errors import QflowError
from qflow.events import Event
from qflow.inspect import Health, owner_of
from qflow.loggers import get_logger
from qflow.serving import presence
from qflow.serving.logins import Logins
from qflow.serving.users import Account, Users
from qflow.web import listing, reading
from qflow.web.figures import Figures
from qflow.web.rights import READER, Rights

JUDGE_S = 2.0
HEALTH_S = 60.0
"""How often the log is read for that, while a page is open: it takes a process for 0.3 s."""
_logger = get_logger("qflow.web")


class Findings:
    """What is wrong with a broker, as `qflow doctor` says it: judged in a thread, every few seconds."""

    def __init__(self, broker: AsyncBroker, figures: Figures) -> None:
        self._broker = broker
        self._figures = figures
        self._found: list[doctor.Finding] = []
        self._judged_s: float | None = None
        self._turn = asyncio.Lock()
        self._health: Health | None = None
        self._health_due_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self.inside = doctor.Look(path=broker.path)
        """What the log and the disk tell, as of the last time that was judged; nothing before."""

    async def now(self) -> list[doctor.Finding]:
        """Return what is wrong, worst first, each by itself. What only the log tells comes a moment later.

        Cost: every few seconds, in a thread, 20 µs a queue; see also `HEALTH_S`.
        """
        async with self._turn:
            if self._reading is None and time.monotonic() >= self._health_due_s:
                self._reading = asyncio.create_task(self._read_health())
            if self._judged_s is None or time.monotonic() - self._judged_s >= JUDGE_S:
                look = await self._figures.look()
                totals = {name: look.totals[name] for name in ("capacity_bytes", "resident_bytes", "spilled_bytes")}
                stats = {"queues": look.queues, "streams": look.streams, **totals}
                self._found = await at_a_glance(self._broker, lambda: self._judged(stats))
                self._judged_s = time.monotonic()
        return self._found

    def close(self) -> None:
        """Read no more."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read_health(self) -> None:
        try:
            self._health = await at_length(self._broker, partial(reading.health, self._broker.path))
        except QflowError as error:
            if not self._broker.closed:
                _logger.warning("findings are without what the log tells: %s", error)
        finally:
            self._reading, self._judged_s = None, None
            self._health_due_s = time.monotonic() + HEALTH_S

    def _judged(self, stats: dict[str, Any]) -> list[doctor.Finding]:
        broker = self._broker.broker
        stats["inbox"] = attrs.asdict(broker.engine.adoption.stats())
        stats["troubles"] = dict(broker.engine.figures.troubles)
        inside = self.inside = doctor.seen_in(broker.path, self._health)
        letters = {name: inside.letters.get(name, doctor.Letters(messages=0)) for name in self._for_letters(stats)}
        letters |= {name: one for name, one in inside.letters.items() if not one.is_named and name in stats["queues"]}
        is_there = owner_of(broker.path) is not None
        look = attrs.evolve(inside, stats=stats, is_there=is_there, owner_pid=os.getpid(), letters=letters)
        return doctor.judge_each(look)

    def _for_letters(self, stats: dict[str, Any]) -> set[str]:
        """Return the queues that others name for their dead letters."""
        queues = self._broker.broker.engine.queues.named().values()
        named = {queue.settings.dead_letter for queue in queues} - {None}
        return {name for name in stats["queues"] if name in named}


EVENTS = 200
READING_AT_ONCE = 2


class Site:
    """See the module. In the loop alone."""

    def __init__(self, broker: AsyncBroker, users: Users | None) -> None:
        self.broker = broker
        self.logins = Logins(users)
        self.sessions = Sessions()
        self.figures = Figures(broker)
        self._findings = Findings(broker, self.figures)
        self.reading = asyncio.Semaphore(READING_AT_ONCE)
        """Whose turn it is to read messages of a queue, which takes a process."""
        self.cookie = "qflow"
        """Of the session: cookies are shared by all ports of a host, so each door has its own."""
        self.is_secure = False
        """All come by TLS."""
        self._events: deque[Event] = deque(maxlen=EVENTS)

    def begin(self) -> None:
        """Listen to events from now on; in the loop."""
        self.broker.on_event(self._events.append)

    def close(self) -> None:
        """Let nobody in any more."""
        self.logins.close()
        self._findings.close()

    # Who asks ----------------------------------------------------------------------------------------------------

    @property
    def has_users(self) -> bool:
        """Somebody has to log in."""
        return self.logins.users is not None

    def rights_of(self, session: Session) -> Rights | None:
        """Return what who has logged in may do now; None if the users file has them no more, or another password."""
        account = self._account(session.user_name)
        if account is None or str(account.password) != session.password:
            return None
        return Rights(account.user)

    async def open_session(self, name: str, password: str, peer: str) -> str | None:
        """Return the value of the cookie of somebody who logs in; None if the password is wrong."""
        account = self._account(name)  # whose password is checked: there may be another one when that is done
        user = await self.logins.check(name, password, peer) if self.has_users else None
        if user is None or account is None:
            return None
        return self.sessions.open(user.name, str(account.password))[0]

    def _account(self, name: str) -> Account | None:
        users = self.logins.users
        return None if users is None else users.accounts.get(name)

    def anybody(self) -> Rights | None:
        """Return what may be done without a login; None if nothing."""
        return None if self.has_users else Rights(READER)

    # What is there -----------------------------------------------------------------------------------------------

    async def queues(self, rights: Rights, wanted: listing.Wanted) -> tuple[list[Mapping[str, Any]], int]:
        """See `listing.listed`. Cost: in a thread, 4 to 7 µs for each queue of the broker."""
        look = await self.figures.look()
        return await at_a_glance(self.broker, partial(listing.listed, look, rights, wanted))

    async def consumers(self, rights: Rights) -> list[dict[str, Any]]:
        """See `listing.consumers`. Cost: as `queues`."""
        look = await self.figures.look()
        return await at_a_glance(self.broker, partial(listing.consumers, look.queues, rights))

    def bindings(self, name: str) -> list[str]:
        """Return the topic filters that lead to a queue."""
        engine = self.broker.broker.engine
        return engine.routing.filters_of(engine.queues.get(name))

    def connections(self, rights: Rights) -> list[presence.Connected]:
        """Return the clients of all doors, or those of the user alone."""
        found = presence.of(self.broker.broker)
        return found if rights.sees_everybody else [one for one in found if one.user == rights.user.name]

    def events(self, rights: Rights) -> list[dict[str, Any]]:
        """Return what happened, the latest first."""
        return [
            {"at_s": event.time_s, "kind": event.kind.value, "queue": event.queue, "detail": event.detail}
            for event in reversed(self._events)
            if not event.queue or rights.sees(event.queue)
        ]

    @property
    def inside(self) -> doctor.Look:
        """What the log and the disk of the spool tell, as of the last findings."""
        return self._findings.inside

    async def findings(self, rights: Rights, about: str | None = None) -> list[Mapping[str, Any]]:
        """Return what is wrong, worst first, as far as the user may know of it; of one queue if that is given."""
        found = [
            one
            for one in await self._findings.now()
            if (about is None or one.queue == about) and (not one.queue or rights.sees(one.queue))
        ]
        return [one.to_dict() for one in doctor.gathered(found, self.broker.path)]


IDLE_S = 1800.0
LONGEST_S = 12 * 3600.0
MOST = 1000
"""Sessions; the one that was used longest ago gives way."""


@attrs.define(eq=False)
class Session:
    """One login of a browser."""

    user_name: str
    password: str = attrs.field(repr=False)
    """The hash of the one that it began with, as the users file had it."""
    csrf: str
    began_s: float
    used_s: float
    notes: list[tuple[str, str]] = attrs.field(factory=list)
    """What the next page says first: kind and sentence."""

    def note(self, kind: str, sentence: str) -> None:
        """Have the next page say something; the last ten are kept."""
        self.notes = [*self.notes[-9:], (kind, sentence)]

    def matches(self, token: str) -> bool:
        """Tell whether a form is one of this session."""
        return hmac.compare_digest(self.csrf.encode(), token.encode(errors="replace"))


class Sessions:
    """Those of one door."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_key: OrderedDict[str, Session] = OrderedDict()

    def open(self, user_name: str, password: str) -> tuple[str, Session]:
        """Return the value of a new cookie, and the session."""
        now = self._clock()
        key, session = secrets.token_urlsafe(32), Session(user_name, password, secrets.token_urlsafe(32), now, now)
        self._by_key[key] = session
        while len(self._by_key) > MOST:
            self._by_key.popitem(last=False)
        return key, session

    def find(self, key: str) -> Session | None:
        """Return the session of a cookie; None if there is none, or it is over."""
        session = self._by_key.get(key)
        if session is None:
            return None
        now = self._clock()
        if now - session.used_s > IDLE_S or now - session.began_s > LONGEST_S:
            del self._by_key[key]
            return None
        session.used_s = now
        self._by_key.move_to_end(key)
        return session

    def close(self, key: str) -> None:
        """End a session; twice is fine."""
        self._by_key.pop(key, None)
