"""Publishing by threads, and what tasks and transactions ask of it: from messages to one commit of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from qflow import config
from qflow.durations import Duration
from qflow.errors import InvalidArgument, QueueDeleted, StreamDeleted, again
from qflow.message import Headers, check_key
from qflow.queues.assembly import Insert, Receipt
from qflow.queues.queue import Queue
from qflow.queues.registry import Queues
from qflow.queues.together import Rider, Together
from qflow.routing import Lots, Routing
from qflow.routing.outgoing import OutgoingMany, OutgoingOne
from qflow.routing.results import PublishResult, duplicate_result, result_of, target_of
from qflow.spool import Spool
from qflow.storage.log.facts import Facts
from qflow.streams import publishing
from qflow.streams.producers import Claim, Producers

Results = Callable[[], Sequence[PublishResult]]
"""Gives what a publish returns, once it is confirmed."""


Rooms = Mapping[str, Mapping[str, bytes | None]]
"""Facts for one commit: by room, the value of each key; None forgets it. See `storage.log.facts`."""


class Kept(Rider):
    """Facts kept in the commit of a publish, as `Together` takes them. Raises InvalidArgument: one is too large."""

    def __init__(self, rooms: Rooms) -> None:
        self.facts = Facts(rooms)
        self.writes = (self.facts.write,)
        self._unit: Any = None

    @property
    def unit(self) -> Any:
        return self._unit

    @unit.setter
    def unit(self, unit: Any) -> None:
        self._unit = unit
        unit.size += self.facts.size
        unit.values += self.facts.values


class Claimed(Rider):
    """A producer's claim, as `Together` takes what goes into its unit; who publishes has it, and may try again."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self.writes = (claim.write,)
        self.committed, self.refused = claim.committed, claim.refused  # type: ignore[method-assign]

    @property
    def unit(self) -> Any:
        return self._claim.unit

    @unit.setter
    def unit(self, unit: Any) -> None:
        self._claim.unit = unit


def listed(messages: Iterable[Any]) -> list[Any]:
    """Return what is to be published. Raises InvalidArgument: it is one thing."""
    try:
        return list(messages)
    except TypeError as error:
        raise InvalidArgument(f"publish_many takes pairs of (topic, body), not {messages!r:.100}") from error


class Publisher:
    """See the module. One a broker; thread-safe."""

    def __init__(
        self, spool: Spool, queues: Queues, producers: Producers, routing: Routing, together: Together
    ) -> None:
        self._spool = spool
        self.log = spool.log
        self._queues = queues
        self._producers = producers
        self._routing = routing
        self._together = together

    def publish(
        self,
        messages: Iterable[tuple[Any, ...]],
        headers: Headers | None,
        producer: str | None,
        number: int | None,
        timeout_s: Duration | None,
    ) -> Sequence[PublishResult]:
        """Publish (topic, body) or (topic, body, key) in one commit; see `Broker.publish_many`."""
        return self._begin(listed(messages), headers, producer, number, timeout_s, None)()

    def submit(
        self,
        message: tuple[Any, ...],
        headers: Headers | None,
        producer: str | None,
        number: int | None,
        timeout_s: Duration | None,
    ) -> Future[PublishResult]:
        """`publish` of one message that does not wait for the sync."""
        result: Future[PublishResult] = Future()
        result.set_running_or_notify_cancel()
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()
        found: list[Results] = []
        resolved: list[Future[Any]] = []

        def finish() -> None:
            """Tell the result: by whoever comes last, of the thread that publishes and the one that resolves `done`."""
            if found and resolved:
                with suppress(IndexError):  # the other one tells it
                    error = resolved.pop().exception()
                    if error is not None:
                        result.set_exception(error)
                    else:
                        result.set_result(found[0]()[0])

        def note(finished: Future[Any]) -> None:
            resolved.append(finished)
            finish()

        # This thread has nothing to do with `done` any more, once others have it: an interrupt might leave it locked.
        done.add_done_callback(note)
        found.append(self._begin([message], headers, producer, number, timeout_s, done))
        finish()
        return result

    def _begin(
        self,
        messages: list[Any],
        headers: Headers | None,
        producer: str | None,
        number: int | None,
        timeout_s: Duration | None,
        done: Future[Any] | None,
    ) -> Results:
        """Publish, or leave that to the writer, and `done`; return what gives the results when it is done."""
        timeout = config.parse_timeout(timeout_s)
        claim = self.claim_of(producer, number)
        if claim is None:
            return self._begin_claimed(messages, headers, None, timeout, done)
        monotonic = self._spool.monotonic
        deadline = None if timeout is None else monotonic() + timeout
        try:
            if not claim.take(timeout):
                if done is not None:
                    done.set_result(None)
                return lambda: [duplicate_result() for _ in messages]
            left = None if deadline is None else max(0.0, deadline - monotonic())
            return self._begin_claimed(messages, headers, claim, left, done)
        except BaseException:
            claim.give_up()
            raise

    def _begin_claimed(
        self,
        messages: list[Any],
        headers: Headers | None,
        claim: Claim | None,
        timeout: float | None,
        done: Future[Any] | None,
    ) -> Results:
        """`_begin`, with a claim that has its number."""
        log = self.log
        while (lots := self._routing.lots(messages, headers)) is not None:
            try:
                sent = publishing.send(log, lots.lots, claim=claim, future=done)
            except StreamDeleted:
                self._routing.forget()
                continue  # it was deleted since, and is not reached any more
            if sent is not None and done is None:
                log.wait(sent.request)
                if sent.request.error is not None:
                    raise again(sent.request.error)
            elif sent is None and done is not None:
                done.set_result(None)
            return partial(lots.results, sent)
        while True:
            out = self.outgoing_of(messages, headers)
            leavings: list[Any] = [] if claim is None else [Claimed(claim)]
            try:
                receipts = self._together.commit(
                    out.inserts(), leavings, puts=out.puts, timeout=timeout, wait=done is None, future=done
                )
            except (QueueDeleted, StreamDeleted):
                self._routing.forget()
                continue
            return partial(out.results, receipts)

    # Parts of it, for tasks and transactions ---------------------------------------------------------------------

    def claim_of(self, producer: str | None, number: int | None) -> Claim | None:
        """Return the claim of a publish, which has not taken its number yet; None without a producer."""
        self._spool.check_open()
        if producer is None:
            if number is not None:
                raise InvalidArgument("number= is that of a producer: say which with producer=")
            return None
        return self._producers.claim(producer, number)

    def lots_of(self, messages: list[Any], headers: Headers | None) -> Lots | None:
        """Return what is published to streams alone; None if some of it goes to queues, which takes `inserts_of`."""
        self._spool.check_open()
        return self._routing.lots(messages, headers)

    def outgoing_of(self, messages: list[Any], headers: Headers | None) -> OutgoingOne | OutgoingMany:
        """Return what a publish puts where, some of it into queues."""
        self._spool.check_open()
        return self._routing.outgoing(messages, headers)

    def inserts_of(
        self, topic: str, body: Any, headers: Headers | None, key: bytes | str | None = None
    ) -> list[Insert]:
        """Return what a publish in a transaction puts where."""
        self._spool.check_open()
        return self._routing.inserts(topic, body, headers, check_key(key))

    def result_of(self, receipts: list[Receipt]) -> PublishResult:
        """Return what a publish returns."""
        return result_of((target_of(receipt.insert.queue), receipt.first) for receipt in receipts)

    def own(self, queue: Queue | str) -> Queue:
        """Return a queue of this broker, given itself or by name; see `Queues.own`."""
        return self._queues.own(queue)
