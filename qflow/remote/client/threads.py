"""A connection for threads: any number of calls at once. A caller waits with nothing held; see also `channel`.

All that came of a connection refers to it, and so does a future that is not resolved; its channel, which the reader
has, does not. So it ends when nobody has any of that.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from qflow.memory.line import FOREVER, Wake
from qflow.memory.waiting import attend, shelter
from qflow.remote.client.channel import Channel
from qflow.remote.client.link import Reason, Reply, Request
from qflow.remote.client.lone import Line
from qflow.remote.client.promises import Call, Promise, Room

T = TypeVar("T")


def _nothing() -> None: ...


class Connection:
    """See the module. Thread-safe."""

    def __init__(self, one: socket.socket, target: str, reason: Reason | None = None) -> None:
        """Take over a connected socket; start the reader. `reason`: see `Link`."""
        self.target = target
        self._channel = Channel(one, target, reason)
        self._link = self._channel.link
        weakref.finalize(self, self._channel.let_go).atexit = False  # the reader still runs
        self._room = Room()
        self.uuid = ""
        """Of the spool, from the owner's first answer on."""

    @property
    def closed(self) -> bool:
        """No call can be made."""
        return self._channel.closed

    @property
    def is_cut(self) -> bool:
        """No call can be made, and nobody has closed it here."""
        return self._channel.is_cut

    # Calls -----------------------------------------------------------------------------------------------------------

    def call(
        self,
        request: Request,
        then: Callable[[Any], T] | None = None,
        timeout: float | None = None,
        begun: Callable[[int], Request | None] | None = None,
    ) -> T:
        """Make a request; return what its answer is read as, or what `then` makes of that.

        Interrupted, it is given up: deliveries that come with the answer go back.

        Args:
            begun: called under the lock with the number of the request; what it returns is sent behind that.

        Raises:
            What the owner raised. BrokerClosed, InDoubt: the connection has ended. TimeoutError: it took too long.
        """
        call = Call(begun)
        try:
            self._channel.hand_over(request.encoded(), call)
            if not call.gate.acquire(timeout=-1 if timeout is None else timeout):
                raise TimeoutError
            outcome = call.outcome
            if isinstance(outcome, Reply):
                result = request.read(outcome)
                return result if then is None else then(result)
        except BaseException:
            try:
                shelter(partial(self._give_up, call, request))
            finally:  # another interrupt may have come before that began
                shelter(partial(self._give_up, call, request))
            raise
        assert outcome is not None
        raise outcome

    def put(self, request: Request) -> Any:
        """`call` for puts: on a connection of their own where they overtake nothing there; see `lone`."""
        lone = self._channel.lone
        if lone is None or self.closed or self._room.messages or self._link.has_unheard:
            return self.call(request)
        if type(request.head) is not bytes:
            return self.call(request)
        outcome = lone.ask(request)
        if outcome is None:
            return self.call(request)
        if isinstance(outcome, Reply):
            return request.read(outcome)
        raise outcome

    def open_lone(self, make: Callable[[], Line | None]) -> None:
        """Have lone puts made on a connection of their own, made when there are many."""
        self._channel.open_lone(make)

    def submit(self, request: Request) -> Future[Any]:
        """Make a request; the future has what its answer is read as. Waits while too much is submitted.

        Raises:
            BrokerClosed: the connection has ended.
        """
        request = request.encoded()
        promise = Promise(request, self._room, self._channel.futures, self)
        attend(partial(self._submit, request, promise), partial(self._give_up_submit, promise))
        return promise.future

    def _submit(self, request: Request, promise: Promise, wake: Callable[[], object]) -> float | None:
        with self._channel.lock:
            self._channel.check_open()
            self._channel.futures.start()
            if not self._room.enter(promise, wake):
                return FOREVER
            try:
                self._link.begin(request, promise, is_submitted=True)
            except BaseException:
                self._room.leave(promise)
                raise
            self._channel.send()
        return None

    def _give_up_submit(self, promise: Promise) -> None:
        with self._channel.lock:
            self._room.give_up(promise)

    @property
    def submitted(self) -> tuple[int, int]:
        """Messages, and bytes of bodies, that were submitted and not answered."""
        return self._room.messages, self._room.bytes

    def settle(self, make: Callable[[], Request | None], wait: bool) -> None:
        """Make a request under the lock, of what is marked as settled there; wait for its answer, or do not.

        Where it does not, it waits before that while much is not sent yet: interrupted then, nothing is marked. Nothing
        is sent where there is nothing to ask for.

        Raises:
            AlreadySettled: of `make`, or of the owner.
        """
        call = Call() if wait else None
        attend(partial(self._settle, make, call), _nothing)
        if call is not None:
            call.gate.acquire()
            if not isinstance(call.outcome, Reply):
                assert call.outcome is not None
                raise call.outcome

    def tell(self, make: Callable[[], Request | None]) -> None:
        """`settle` that waits for nothing: for who must not wait, and has little to say."""
        shelter(partial(self._settle, make, None, None))

    def _settle(self, make: Callable[[], Request | None], call: Call | None, wake: Wake | None) -> float | None:
        with self._channel.lock:
            self._channel.check_open()
            if call is None and wake is not None and self._channel.must_wait(wake):
                return FOREVER
            request = make()
            if request is None:
                if call is not None:
                    call.answered(Reply(None, []))
            elif call is not None:
                call.number = self._link.begin(request, call)
            else:
                self._link.tell(request)
            self._channel.send()
        return None

    def check_open(self) -> None:
        """Raises BrokerClosed: it has ended. ForkedProcess: it is another process's."""
        self._channel.check_open()

    def locked(self, function: Callable[[], T]) -> T:
        """Return what a function returns that looks at, or changes, what callers hold."""
        return self._channel.locked(function)

    def _give_up(self, call: Call, request: Request) -> None:
        """Give up a call that was interrupted; nothing if it never began, or failed. Twice is fine."""
        with self._channel.lock:
            call.given_up = True
            if self._link.ended is not None or not call.number:
                return
            number, call.number = call.number, 0
            if isinstance(call.outcome, Reply):
                self._link.give_back(request.undo, call.outcome)
            else:
                self._link.give_up(number)
            self._channel.send()

    # The end ---------------------------------------------------------------------------------------------------------

    def welcomed(self, welcome: dict[str, Any]) -> None:
        """The owner has told who it is, and its limits."""
        self.uuid = welcome["uuid"]
        self._channel.welcomed(welcome["limits"])

    def listen(self, call: Callable[[dict[str, Any]], object], ended: Callable[[], object]) -> None:
        """Have the heads of notices given to a function, and have one called at the end. All under the lock."""
        self._channel.listen(call, ended)

    def close(self) -> None:
        """End the connection; calls that wait get BrokerClosed, and what nobody waits for is heard. Twice is fine."""
        self._channel.close()
