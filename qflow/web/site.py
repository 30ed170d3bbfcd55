"""What all requests of a door share: the broker, who may log in, who has, the figures, and what has happened lately."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from qflow import doctor
from qflow.aio.broker import AsyncBroker
from qflow.events import Event
from qflow.serving import presence
from qflow.serving.logins import Logins
from qflow.serving.users import Account, User, Users
from qflow.web.figures import Figures
from qflow.web.findings import Findings
from qflow.web.rights import READER, Rights
from qflow.web.sessions import Session, Sessions

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
        user = await self.login(name, password, peer) if self.has_users else None
        if user is None or account is None:
            return None
        return self.sessions.open(user.name, str(account.password))[0]

    def _account(self, name: str) -> Account | None:
        users = self.logins.users
        return None if users is None else users.accounts.get(name)

    async def login(self, name: str, password: str, peer: str) -> User | None:
        """Return the user if the password is right; a wrong one takes the longer the more there were."""
        return await self.logins.check(name, password, peer)

    def anybody(self) -> Rights | None:
        """Return what may be done without a login; None if nothing."""
        return None if self.has_users else Rights(READER)

    # What is there -----------------------------------------------------------------------------------------------

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

    async def findings(self, rights: Rights) -> list[Mapping[str, Any]]:
        """Return what is wrong, worst first, as far as the user may know of it."""
        return [one for one in await self._findings.now() if not one["queue"] or rights.sees(one["queue"])]
