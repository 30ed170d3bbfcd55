"""What callers hand over to the writer, and how they wake it. Any thread may, where a signal handler strikes, too."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from qflow.errors import BrokerClosed, BrokerFailed, QflowError, said_by
from qflow.storage.log.batch import Request
from qflow.storage.log.confirming import Confirming
from qflow.storage.log.direct import Direct


class Handing:
    """See the module. One a log."""

    def __init__(self, path: str, confirming: Confirming, clock: Callable[[], float]) -> None:
        self._path = path
        self.requests: deque[Request] = deque()
        self.asleep = threading.Lock()
        """Held while nobody asked for a batch; not a queue, see `Alarm`."""
        self.asleep.acquire()
        self.told = self.urgent = False
        """Somebody asks for a batch, or has; and for one at once."""
        self.goal = 0
        """A batch is asked for at once by who makes that many requests of those that stand before the writer."""
        self.turn = Direct(confirming, clock, self.asleep.release)
        """Who may write: the writer, or a thread that stands alone while that rests."""
        self.failure: BaseException | None = None
        """Why the log takes nothing more."""
        self.ended = False
        """The writer has ended: who hands over after this takes it back."""

    def hand_over(self, request: Request, soon: bool = True) -> None:
        """Take a request: it will be done within milliseconds, or told why not, whatever becomes of its caller.

        Args:
            soon: False for a caller who calls `now` when others had their turn to hand over, too.

        Raises:
            BrokerFailed, BrokerClosed: the log takes nothing any more; it was not handed over.
        """
        self.check_usable()
        one, wake = (request,), self.asleep.release
        # From here until it is woken no call returns and nothing jumps back: an interrupt comes before that or after.
        request.joined = True
        self.requests += one
        if soon and not self.told:
            self.told = True
            try:  # noqa: SIM105  that would be a call
                wake()
            except RuntimeError:  # it is awake
                pass
        self._check_ended(request)

    def takes_turn(self, request: Request) -> bool:
        """Have a request take the turn, if it stands alone; tell whether it has. Its thread confirms it next.

        Raises as `hand_over`.
        """
        self.check_usable()
        turn = self.turn
        # Nothing is called from here on: no other thread comes in between.
        if turn.open and turn.request is None and not self.requests:
            request.joined = True
            turn.request = request
            return True
        return False

    def handed_over(self, request: Request, *, urgent: bool | None) -> None:
        """After a caller has appended a request by itself, under a lock: have it written. Raises as `hand_over`.

        Args:
            urgent: None for a caller who calls `now` when others had their turn to hand over, too.
        """
        if self.turn.request is request:
            return
        if urgent:
            request.rung = True
            self.now()
        elif urgent is not None:
            self.rouse()
        self._check_ended(request)

    def rouse(self) -> None:
        """Have what was handed over written within milliseconds. Cost: nothing if the writer knows."""
        if not self.told:
            self.told = True
            try:  # noqa: SIM105  that would be a call
                self.asleep.release()
            except RuntimeError:  # it is awake
                pass

    def look_after(self) -> None:
        """Have written what has stood there since the last call: its caller was interrupted, and told nobody."""
        self.turn.look_after()
        try:
            first = self.requests[0]
        except IndexError:
            return
        if first.stood:
            self.rouse()
        first.stood = True

    def _check_ended(self, request: Request) -> None:
        """Take a request back that came too late."""
        if self.ended:
            with suppress(ValueError):  # the writer has it, and refuses it
                self.requests.remove(request)
                request.joined = False
                raise self.refusal()

    def now(self) -> None:
        """Have what was handed over written at once. An interrupt comes before it or after."""
        if not self.urgent and len(self.requests) >= self.goal:
            self.urgent = True
            try:  # noqa: SIM105  that would be a call
                self.asleep.release()
            except RuntimeError:  # it is awake
                pass

    def check_usable(self) -> None:
        """Refuse what could not be written any more."""
        if self.failure is not None or self.ended:
            raise self.refusal()

    def refusal(self) -> QflowError:
        if self.failure is not None:
            why = said_by(self.failure)
            return BrokerFailed(f"the log failed earlier ({why}); close the broker and open the spool again")
        return BrokerClosed(f"the log {self._path} is closed: open the spool again")
