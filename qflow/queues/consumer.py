"""Push instead of pull: a thread that takes from a queue and calls back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from qflow.backoff import retried
from qflow.callbacks import check_callback, check_ran
from qflow.config import parse_count, parse_timeout
from qflow.delivery import Delivery
from qflow.durations import Duration
from qflow.errors import AlreadySettled, BrokerClosed, ForkedProcess, QflowError, QueueDeleted
from qflow.events import EventKind
from qflow.held_batch import HeldBatch
from qflow.importing import imported
from qflow.loggers import get_logger
from qflow.memory.line import Alarm
from qflow.memory.waiting import shelter, sheltered
from qflow.pickling import Unpicklable
from qflow.queues.claims import Claims
from qflow.queues.gets import Gets
from qflow.starting import start
from qflow.takers import ConsumerClosed, Noted, Taker, cut_name, parse_name

if TYPE_CHECKING:
    from qflow.options import ConsumeOptions

_logger = get_logger("qflow")

PREFETCH = 100
AGAIN_S = 0.5
"""How long a consumer rests after a get that failed, before it tries again."""

GONE = (BrokerClosed, QueueDeleted, ConsumerClosed)
"""What ends a consumer if it comes of its own queue; what its callback raises is of any."""


class Listed(Protocol):
    """What a queue knows its consumers by."""

    @property
    def taker(self) -> Taker: ...
    def stop(self) -> None: ...
    def end(self) -> None: ...
    def holds(self, held: Iterable[Any]) -> bool: ...


class Consumed(Protocol):
    """The queue that a consumer takes from."""

    @property
    def name(self) -> str: ...
    def collect(
        self, most: int, timeout_s: float | None, taker: Noted, stopped: Callable[[], bool] | None = None
    ) -> HeldBatch: ...
    def leave_batch(self, batch: HeldBatch, index: int) -> Delivery | None: ...
    def give_up_batch(self, batch: HeldBatch) -> None: ...
    def wake(self) -> None: ...
    def list_consumer(self, consumer: Listed) -> None: ...
    def forget_consumer(self, consumer: Listed) -> None: ...
    def tell_failure(self, sequence: int | None, error: BaseException) -> None: ...
    def tell_end(self, error: QflowError) -> None: ...


class Troubles:
    """Errors of a consumer's gets: the same one is told once, until a get succeeds."""

    def __init__(self, tell_failure: Callable[[int | None, BaseException], object]) -> None:
        self._tell_failure = tell_failure
        self._told = ""

    def tell(self, error: Exception) -> None:
        """A get has failed."""
        text = repr(error)
        if text != self._told:
            self._told = text
            self._tell_failure(None, error)

    def end(self) -> None:
        """A get has succeeded."""
        self._told = ""


class Consuming:
    """A thread that hands a queue's messages to a callback, one after the other."""

    def __init__(
        self, queue: Consumed, callback: Callable[[Delivery], object], prefetch: int, name: str | None = None
    ) -> None:
        self.name = queue.name
        self.taker = consuming_taker(queue.name, name)
        self._queue = queue
        self._callback = callback
        self._prefetch = prefetch
        self._stopped = False
        self._batch: HeldBatch | None = None
        self._current: Delivery | None = None
        self._troubles = Troubles(queue.tell_failure)
        self._alarm = Alarm()  # ends a rest
        self._thread = threading.Thread(target=self._run, name=self.taker.name, daemon=True)

    @property
    def running(self) -> bool:
        """See `Consumer.running`."""
        return self._thread.is_alive() and not self._stopped

    def start(self) -> None:
        start(self._thread)

    def stop(self) -> None:
        """See `Consumer.stop`."""
        self._stopped = True
        self._alarm()
        self._queue.wake()

    def end(self) -> None:
        """Take no more messages, and give up at once what was not handed out. Under the lock of the queue."""
        self._stopped = True
        self._alarm()
        if self._batch is not None:
            self._queue.give_up_batch(self._batch)

    def close(self, timeout_s: Duration | None = None) -> bool:
        """See `Consumer.close`."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(parse_timeout(timeout_s))
        return not self._thread.is_alive()

    def holds(self, held: Iterable[Any]) -> bool:
        """Tell whether one of these is what it works on."""
        return any(one is self._batch or one is self._current for one in held)

    def _run(self) -> None:
        try:
            while not self._stopped:
                try:
                    self._hand_over()
                except GONE as error:
                    if not self._stopped:
                        self._queue.tell_end(error)
                    return
                except Exception as error:
                    self._troubles.tell(error)
                    self._alarm.wait(AGAIN_S)
        finally:
            self._stopped = True
            if self._batch is not None:
                self._queue.give_up_batch(self._batch)
            self._queue.forget_consumer(self)

    def _hand_over(self) -> None:
        """Take a batch, and call back for each message of it."""
        queue = self._queue
        if self._batch is not None:  # what is left of one that failed, for want of memory
            queue.give_up_batch(self._batch)
            self._batch = None
        batch = self._batch = queue.collect(self._prefetch, None, self.taker, lambda: self._stopped)
        self._troubles.end()
        for index in range(len(batch)):
            if self._stopped:
                queue.give_up_batch(batch)
                break
            try:
                delivery = queue.leave_batch(batch, index)
            except AlreadySettled:
                break  # it was held for too long: all of it went back
            if delivery is not None:
                self._handle(delivery)
        self._batch = None

    def _handle(self, delivery: Delivery) -> None:
        self._current = delivery
        raised: BaseException | None = None
        try:
            with delivery:
                try:
                    check_ran(self._callback(delivery))
                except BaseException as error:  # `SystemExit`, too, and `CancelledError`: nobody else would hear of it
                    raised = error
                    raise
        except BaseException as error:
            if error is not raised and isinstance(error, GONE):
                raise
            self._queue.tell_failure(delivery.sequence, error)
        finally:
            self._current = raised = None  # its traceback leads here


class Consumer(Unpicklable):
    """A queue's messages are handed to a callback, by a thread or several. Made by `Queue.consume`."""

    _threads: tuple[Consuming, ...]

    @property
    def running(self) -> bool:
        """It takes messages; False once it was closed, its queue was deleted or the broker closed."""
        return any(one.running for one in self._threads)

    def stop(self) -> None:
        """Take no more messages; the callbacks that are running are not waited for."""
        for one in self._threads:
            one.stop()

    def close(self, timeout_s: Duration | None = None) -> bool:
        """Stop, and wait for the callbacks that are running; return whether they ended in time.

        What was acquired and not handed out goes back to its place and is not counted as delivered.
        """
        timeout = parse_timeout(timeout_s)
        ends = None if timeout is None else time.monotonic() + timeout
        self.stop()
        closed = [one.close(None if ends is None else max(0.0, ends - time.monotonic())) for one in self._threads]
        return all(closed)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ForkedProcess):  # the parent goes on with it
            self.close()

    def __repr__(self) -> str:
        return f"<Consumer of {self._threads[0].name!r}{'' if self.running else ', closed'}>"


def begin_consumer(
    take_from: Callable[[], Consumed],
    callback: Callable[[Delivery], object],
    start: Callable[[Consuming], object],
    how: ConsumeOptions,
) -> Consumer:
    """Return a running consumer; `take_from` gives what a thread takes from, `start` begins it.

    Raises:
        InvalidArgument: an option makes no sense, or the callback would not run. TypeError: there is no such option.
        QflowError: there can be no more threads.
    """
    options = imported("qflow.options")  # no open needs them
    options.check_options("consumer", how, options.ConsumeOptions.__annotations__.keys())
    check_callback(callback)
    prefetch = parse_count(how.get("prefetch", PREFETCH), "prefetch")
    threads = parse_count(how.get("concurrency", 1), "concurrency")
    name, called = how.get("name"), retried(callback, how.get("retry"))
    consumer = Consumer()
    consumer._threads = tuple(Consuming(take_from(), called, max(1, prefetch // threads), name) for _ in range(threads))
    try:
        for one in consumer._threads:
            shelter(partial(start, one))
    except BaseException:
        consumer.stop()  # nobody will close it
        raise
    return consumer


def consuming_taker(queue: str, name: str | None) -> Taker:
    """Return what is noted with what a consumer takes."""
    known = cut_name(f"qflow-consumer-{queue}") if name is None else parse_name(name, "name")
    return Taker(known, "consumer", in_hand=0)  # what is handed out has left its batch


class Consumers:
    """Those of one queue, and what they take from it."""

    def __init__(self, gets: Gets, claims: Claims) -> None:
        self._context = gets.context
        self._gets = gets
        self._claims = claims
        self.name = claims.name
        self.listed: dict[Listed, None] = {}
        self.guests: dict[Taker, None] = {}
        """Consumers of protocols, and of other processes: they are told of, and end by themselves."""

    def collect(
        self, most: int, timeout_s: float | None, taker: Noted, stopped: Callable[[], bool] | None = None
    ) -> HeldBatch:
        """See `Gets.collect`."""
        return self._gets.collect(most, timeout_s, taker, stopped)

    def leave_batch(self, batch: HeldBatch, index: int) -> Delivery | None:
        """See `Claims.leave_batch`."""
        return self._claims.leave_batch(batch, index)

    def give_up_batch(self, batch: HeldBatch) -> None:
        """See `Claims.give_up`."""
        self._claims.give_up(batch)

    @sheltered
    def list_consumer(self, consumer: Listed) -> None:
        """A consumer begins."""
        with self._context.lock:
            self._context.check_open()
            self.listed[consumer] = None
            consumer.taker.since_s = self._context.monotonic()
            self._note_change()

    def start(self, consuming: Consuming) -> None:
        """Have a consumer of this queue begin."""
        self.list_consumer(consuming)
        try:
            consuming.start()
        except BaseException:  # nobody else will: it has no thread
            self.forget_consumer(consuming)
            raise

    @sheltered
    def forget_consumer(self, consumer: Listed) -> None:
        """A consumer has ended."""
        with self._context.lock:
            self.listed.pop(consumer, None)
            self._note_change()

    @sheltered
    def welcome(self, guest: Taker) -> None:
        """One begins that this queue does not run."""
        with self._context.lock:
            self.guests[guest] = None
            guest.since_s = self._context.monotonic()
            self._note_change()

    @sheltered
    def see_off(self, guest: Taker) -> None:
        """It has ended; twice is fine."""
        with self._context.lock:
            self.guests.pop(guest, None)
            self._note_change()

    def takers(self) -> dict[Taker, None]:
        """Return all that consume. Also without the lock."""
        return {**dict.fromkeys([consumer.taker for consumer in [*self.listed]]), **self.guests}

    def _note_change(self) -> None:
        self._gets.gate.note_change()

    @sheltered
    def wake(self) -> None:
        """Let every waiting getter look whether it is to stop."""
        with self._context.lock:
            self._gets.gate.arrived.notify_all()

    def tell_failure(self, sequence: int | None, error: BaseException) -> None:
        """A consumer's callback has raised; or, without a sequence, the consumer could not get a message."""
        what = "to get a message, and tries again" if sequence is None else f"with message {sequence}"
        _logger.error(
            "the consumer of queue %r failed %s",
            self.name,
            what,
            exc_info=error,
            extra={"queue": self.name, "event": "consumer_failed"},
        )
        self._context.tell(EventKind.CONSUMER_FAILED, f"{what}: {error!r}")

    def tell_end(self, error: QflowError) -> None:
        """A consumer ends, for its broker is closed, or its queue deleted: whoever has done it knows."""

    def end_all(self) -> None:
        """Have all of them end. Under the lock."""
        for consumer in self.listed:
            consumer.end()

    def close_holding(self, held: Collection[Any]) -> list[Listed]:
        """Return those that work on some of this, to be stopped; guests are told by their next get. Under the lock."""
        for one in held:
            if one.taker in self.guests:
                one.taker.is_closed = True
        return [consumer for consumer in self.listed if consumer.holds(held)] if held else []
