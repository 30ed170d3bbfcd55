"""Requests numbered, replies matched, without any I/O: what threads and tasks share.

A call that is given up goes on being known until its answer comes: deliveries that come with it are given back.
Requests with columns are sent as the owner's limits allow, the others kept, by their lines (see `lines`) and, where it
is bytes that lack, in their order: a put that waits for room in a queue holds up no get, and no ack.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from qflow.errors import BrokerClosed, InDoubt, InvalidArgument, QflowError, TransactionTooLarge, again
from qflow.named_tuples import NamedTuple
from qflow.remote.client.lines import ANY, Lined, Lines
from qflow.remote.wire import frames
from qflow.remote.wire.errors import decode_error
from qflow.remote.wire.frames import (
    MOST_FRAME_BYTES,
    MOST_HEAD_BYTES,
    START_BYTES,
    Frame,
    FrameReader,
    Head,
    WireError,
    encode_frame,
    encode_head,
    shorten_timeout,
    timeout_of,
)

FIRST_FRAME_BYTES = 16 * 2**20
"""The longest frame before the owner has told its own limit."""
ANSWER_BYTES = 2**32 - 1
MOST_REQUESTS, CREDIT_BYTES = 1000, 32 * 2**20
"""Of requests with columns, under way at once, where the owner tells nothing else."""
CLOSE_S = 1.0
"""At the end of a connection the owner is to hear within that what was told and nobody waits for."""


Reason = Callable[[], QflowError | None]
Undo = Callable[[Any], "Request | None"]
"""Given a result that nobody was handed, returns what lets go of what the owner holds for it, if that is anything."""


class Reply(NamedTuple):
    """A result, and columns."""

    result: Any
    columns: list[list[Any]]


def _result(reply: Reply) -> Any:
    return reply.result


class Request(NamedTuple):
    """What a call asks for, and how its answer is read."""

    head: Head | bytes
    columns: Sequence[Sequence[Any]] = ()
    doubt: str = ""
    """What may have been done if no answer comes; empty where that does not matter."""
    read: Callable[[Reply], Any] = _result
    undo: Undo | None = None
    line: str = ANY
    """See `lines`."""

    def encoded(self) -> Request:
        """Return the same with its head as bytes. Raises InvalidArgument: JSON cannot say it."""
        if isinstance(self.head, bytes):
            return self
        try:
            return self._replace(head=encode_head(self.head))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"this call cannot be sent: {error}: give it plain values") from error

    @property
    def size(self) -> int:
        """Bytes of what its columns hold."""
        try:
            return sum(sum(map(len, column)) for column in self.columns)
        except TypeError:  # some are None
            return sum(len(item) for column in self.columns for item in column if item is not None)

    @property
    def frame_size(self) -> int:
        """Bytes of the frame that it is sent as, once its head is encoded."""
        return START_BYTES + len(self.head) + sum(4 + 4 * len(column) for column in self.columns) + self.size


class Waiting(Protocol):
    """Somebody who waits for a reply."""

    def answered(self, outcome: Reply | QflowError) -> None: ...


class _Given(Lined):
    """A request that was made, and is not answered."""

    __slots__ = ("doubt", "has_columns", "kept", "number", "since", "size", "undo", "waiting")

    def __init__(self, number: int, request: Request, waiting: Waiting, line: str | None) -> None:
        super().__init__(line)
        self.number = number
        self.doubt = request.doubt
        self.undo = request.undo
        self.waiting: Waiting | None = waiting
        """None: it was given up."""
        self.has_columns = bool(request.columns)
        self.kept: list[bytes] | None = None
        """What is to be sent, and is not yet; since when:"""
        self.since = 0.0
        self.size = 0
        """Bytes that were sent, of a request with columns."""


class Link:
    """See the module. Not thread-safe."""

    def __init__(self, target: str, reason: Reason | None = None) -> None:
        """`reason`: returns why a connection has ended that had begun, where something else than that knows."""
        self.target = target
        self._reason = reason
        self.ended: QflowError | None = None
        """Why no answer comes any more."""
        self._refused: QflowError | None = None
        """Why no call can be made any more: it has ended, or the owner has told that it begins nothing more."""
        self.limits: dict[str, int] = {}
        self.notices: list[Callable[[Head], object]] = []
        """Called with the heads of notices but the last."""
        self._reader = FrameReader(FIRST_FRAME_BYTES)
        self._start: bytearray | None = bytearray()
        self._given: dict[int, _Given] = {}
        self._lines: Lines[_Given] = Lines(MOST_REQUESTS, self._has_place)
        self._placed: OrderedDict[int, _Given] = OrderedDict()
        """By number: requests that have a place, and wait for bytes, in their order."""
        self._size = 0
        """Of requests with columns that were sent and are not answered: of those that fit in the credit together."""
        self._sent = 0
        """How many these are."""
        self._is_large_sent = False
        """One of these is larger than the credit."""
        self._last = 0
        self._unheard = 0
        """The request whose answer tells that all was heard that nobody waits for; -1: there is none yet."""
        self._out: list[bytes] = [frames.preamble()]
        self._closing = ""
        """What the owner says before it ends the connection, behind the answers to all that it has begun."""

    def take(self) -> list[bytes]:
        """Return what is to be sent now, and forget it."""
        out, self._out = self._out, []
        return out

    @property
    def has_output(self) -> bool:
        return bool(self._out)

    @property
    def under_way(self) -> int:
        """Requests whose answers are to come."""
        return len(self._given)

    @property
    def has_unheard(self) -> bool:
        """What was sent, and nobody waits for, may not have been heard yet."""
        return self._unheard != 0

    @property
    def must_be_heard(self) -> bool:
        """The owner is to hear what was sent before the connection is closed: it may be acks."""
        return self._unheard != 0 and self.ended is None and bool(self.limits)

    @property
    def refuses(self) -> bool:
        """No call can be made any more; it may not have ended yet."""
        return self._refused is not None

    def begin(self, request: Request, waiting: Waiting, *, is_submitted: bool = False) -> int:
        """Have a request sent; return its number.

        Args:
            is_submitted: its caller does not wait, and what he asks for later goes behind it.

        Raises:
            BrokerClosed: the connection has ended. InvalidArgument, TransactionTooLarge: it cannot be sent.
        """
        self.check()
        number = self._last % 0xFFFFFFFF + 1
        while number in self._given:
            number = number % 0xFFFFFFFF + 1
        parts = self._encoded(number, request)
        self._last = number
        given = self._given[number] = _Given(number, request, waiting, None if is_submitted else request.line)
        if self._unheard < 0:
            self._unheard = number
        if not given.has_columns:
            self._out += parts
            return number
        given.kept = parts
        if not self._lines.ask(given):
            given.since = monotonic()
        elif self._placed or not self._takes(sum(map(len, parts))):
            given.since = monotonic()
            self._placed[number] = given
        else:
            self._send(given)
        return number

    def kept_s(self, number: int) -> float | None:
        """Return the time-out of a request that waits in its line, if it has one: call `hurry` then."""
        given = self._given[number]
        return None if given.kept is None or given.has_place or given.line is None else timeout_of(given.kept[1])

    def hurry(self, number: int) -> None:
        """Have a request sent whose time-out is over, if it waits in its line: the owner is to say if there is room."""
        given = self._given.get(number)
        if given is not None and given.kept is not None and not given.has_place and self._lines.hurry(given):
            self._has_place(given)

    def _has_place(self, given: _Given) -> None:
        self._placed[given.number] = given
        self._send_placed()

    def _send_placed(self) -> None:
        """Send what waits for bytes, as much as the owner takes now."""
        while self._placed:
            number, given = next(iter(self._placed.items()))
            assert given.kept is not None
            if not self._takes(sum(map(len, given.kept))):
                return
            del self._placed[number]
            self._send(given)

    def _send(self, given: _Given) -> None:
        """Send a request with columns; what it has waited is a part of its time-out."""
        assert given.kept is not None
        parts = shorten_timeout(given.kept, monotonic() - given.since) if given.since else given.kept
        given.kept = None
        given.size = size = sum(map(len, parts))
        self._sent += 1
        if size > self._credit:
            self._is_large_sent = True
        else:
            self._size += size
        self._out += parts

    @property
    def _credit(self) -> int:
        return self.limits.get("bytes", CREDIT_BYTES)

    def _takes(self, size: int) -> bool:
        if not self.limits or not self._sent:
            return True
        return not self._is_large_sent if size > self._credit else self._size + size <= self._credit

    def _is_over(self, given: _Given) -> None:
        """A request with columns was answered, or is not sent any more."""
        if given.kept is None:
            self._sent -= 1
            if given.size > self._credit:
                self._is_large_sent = False
            else:
                self._size -= given.size
        given.kept = None
        self._placed.pop(given.number, None)
        self._lines.leave(given)
        self._send_placed()

    def tell(self, request: Request) -> None:
        """Have a request sent that nobody waits for. Raises as `begin`."""
        self.check()
        self._out += self._encoded(0, request)
        self._unheard = -1

    def _encoded(self, number: int, request: Request) -> list[bytes]:
        request = request.encoded()
        head: Any = request.head
        size, most = request.frame_size, min(self.limits.get("frame_bytes", FIRST_FRAME_BYTES), MOST_FRAME_BYTES)
        if size > most:
            raise TransactionTooLarge(
                f"this call takes {size} bytes, and the owner takes {most} at once: make it smaller"
            )
        if len(head) > MOST_HEAD_BYTES:
            raise TransactionTooLarge(
                f"what this call says beside its bodies takes {len(head)} bytes, and the owner takes "
                f"{MOST_HEAD_BYTES} bytes at once: make it smaller"
            )
        return encode_frame(number, head, request.columns)

    def number_of(self, waiting: Waiting) -> int:
        """Return the number of the request whose answer somebody waits for; 0: there is none. Cost: O(under way)."""
        return next((number for number, given in self._given.items() if given.waiting is waiting), 0)

    def check(self) -> None:
        """Raises BrokerClosed: no call can be made; before the owner has answered at all, what ended the connection."""
        if self._refused is not None:
            raise BrokerClosed(*self._refused.args) if self.limits else again(self._refused)

    def give_up(self, number: int) -> None:
        """Nobody waits for an answer any more: have the owner told, and given back what may come with it.

        So for an answer that has come, if it was an error: of a gap the owner tells the next one then.
        """
        if self.ended is not None:
            return
        given = self._given.get(number)
        if given is not None and given.kept is not None:
            del self._given[number]
            if number == self._unheard:
                self._unheard = -1
            self._is_over(given)
        else:
            if given is not None:
                given.waiting = None
            self._out += encode_frame(0, {"op": "cancel", "request": number})
            self._unheard = -1

    def give_back(self, undo: Undo | None, reply: Reply) -> None:
        """Have the owner let go of what came with an answer, and nobody was handed: deliveries, or a subscription."""
        request = None if undo is None or self._refused is not None else undo(reply.result)
        if request is not None:
            self.tell(request)

    def feed(self, data: bytes | memoryview) -> None:
        """Take what came; tell those who wait. Raises WireError: the other side does not keep to the protocol."""
        if self._start is not None:
            self._start += data
            if len(self._start) < frames.PREAMBLE_BYTES:
                return
            data, self._start = bytes(self._start), None
            version = frames.read_preamble(data)
            if not frames.OLDEST <= version <= frames.VERSION:
                raise WireError(
                    f"the owner speaks version {version} of the protocol of its door, and this client "
                    f"{frames.OLDEST} to {frames.VERSION}"
                )
            data = data[frames.PREAMBLE_BYTES :]
        for frame in self._reader.feed(data):
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        number, head, columns, _ = frame
        if not number:
            self._notice(head)
            return
        given = self._given.get(number)
        if given is None:
            raise WireError(f"the owner answered request {number}, which is not under way")
        if given.has_columns:
            self._is_over(given)
        if number == self._unheard:
            self._unheard = 0
        if "error" in head:
            outcome: Reply | QflowError = decode_error(head)
            if isinstance(outcome, BrokerClosed):
                self._refused = self._refused or outcome
        else:
            outcome = Reply(head.get("result"), columns)
        if given.waiting is not None:
            given.waiting.answered(outcome)
        elif isinstance(outcome, Reply):
            self.give_back(given.undo, outcome)
        del self._given[number]  # behind that: whoever was not told, for a signal handler has raised, hears of the end

    def _notice(self, head: Head) -> None:
        if "closing" in head:
            self._closing = str(head["closing"])
        elif "error" in head:
            self.end(decode_error(head))
        else:
            for call in self.notices:
                call(head)

    def welcomed(self, limits: dict[str, int]) -> None:
        """The owner has told its limits."""
        self.limits = limits
        self._lines.most = limits.get("requests", 1)
        self._reader.most_bytes = self._reader.most_head_bytes = ANSWER_BYTES

    def end(self, why: QflowError | None = None) -> None:
        """No answer comes any more: tell all who wait; twice is fine."""
        if self.ended is None:
            if why is None and self.limits and self._reason is not None:
                why = self._reason()
            self.ended = why or BrokerClosed(self._closing or cut(self.target))
            self._refused = self.ended
        text = str(self.ended)
        all_given, self._given = self._given, {}
        self._lines, self._placed = Lines(0, self._has_place), OrderedDict()
        for given in all_given.values():
            if given.waiting is None:
                continue
            if given.doubt and given.kept is None and not self._closing:
                given.waiting.answered(InDoubt(f"{given.doubt} may hold or not: {text}"))
            else:
                given.waiting.answered(why if why is not None and not self.limits else BrokerClosed(text))


def cut(target: str, how: str = "") -> str:
    """Return what is told of a connection that has ended, nobody here having closed it."""
    return f"the connection to the owner of {target} has ended{f' ({how})' if how else ''}: connect again"
