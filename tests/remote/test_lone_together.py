"""Lone puts that are sent as one: each caller is told what became of its own, as if it had been sent by itself."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import qflow
from qflow import DiskFull, InDoubt
from qflow.remote.client import lone
from qflow.remote.client.connecting import open_socket
from qflow.remote.client.requests import put as put_request
from qflow.remote.wire.errors import encode_error
from qflow.remote.wire.frames import encode_frame


class Struck(socket.socket):
    """A handler runs, and perhaps raises, as soon as something was sent or has come."""

    def sendmsg(self, *given: Any) -> int:
        sent = super().sendmsg(*given)
        signal.raise_signal(signal.SIGUSR1)
        return sent

    def recv_into(self, *given: Any) -> int:
        count = super().recv_into(*given)
        signal.raise_signal(signal.SIGUSR1)
        return count


@pytest.fixture
def ends() -> Iterator[tuple[lone.Line, socket.socket]]:
    """A line, and the owner's end of it, which the test plays."""
    near, far = socket.socketpair()
    with near, far:
        yield lone.Line(near, "spool"), far


def asked(*queues: str) -> list[lone.Asked]:
    return [lone.Asked(put_request(queue, b"x", {})) for queue in queues]


def answers(*heads: dict[str, Any]) -> bytes:
    return b"".join(b"".join(encode_frame(number, head)) for number, head in enumerate(heads, 1))


def test_what_was_answered_before_the_end_is_known_and_the_rest_is_in_doubt(
    ends: tuple[lone.Line, socket.socket],
) -> None:
    """Those sent as one are answered together."""
    line, far = ends
    far.sendall(answers({"result": {"first": 7, "count": 2}}))
    far.shutdown(socket.SHUT_WR)
    first, second, other, third = together = asked("a", "a", "b", "a")
    line.ask_all(together)
    assert [one.outcome.result for one in (first, second) if isinstance(one.outcome, lone.Reply)] == [
        {"first": 7, "count": 1},
        {"first": 8, "count": 1},
    ]
    assert isinstance(other.outcome, InDoubt)
    assert isinstance(third.outcome, InDoubt)
    assert line.ended


@pytest.mark.parametrize("size", [0, 200_000])
def test_nothing_is_in_doubt_where_the_owner_had_gone_before(ends: tuple[lone.Line, socket.socket], size: int) -> None:
    """It heard nothing: the long way tells, or there is another owner."""
    line, far = ends
    far.close()
    together = [lone.Asked(put_request(queue, bytes(size), {})) for queue in "aab"]
    line.ask_all(together)
    assert [one.outcome for one in together] == [lone.NOT_MADE] * 3
    assert line.ended


@pytest.mark.parametrize("size", [0, 200_000])
def test_all_are_in_doubt_of_which_a_part_was_sent(ends: tuple[lone.Line, socket.socket], size: int) -> None:
    """A signal came, and then the owner went."""
    line, far = ends

    class Struck(socket.socket):
        def sendmsg(self, parts: Any, *_: Any) -> int:
            sent = super().sendmsg([b"".join(parts)[:10]])
            far.close()
            return sent

    with Struck(fileno=line.socket.detach()) as struck:
        line.socket = struck
        together = [lone.Asked(put_request(queue, bytes(size), {})) for queue in "aab"]
        line.ask_all(together)
    assert all(isinstance(one.outcome, InDoubt) for one in together)
    assert line.ended


@pytest.mark.parametrize(
    "error", [TimeoutError(110, "too late"), IndexError("too late"), KeyboardInterrupt("too late")]
)
@pytest.mark.parametrize("operation", ["sendmsg", "recv_into"])
def test_an_error_that_a_handler_raises_comes_out_and_what_was_sent_is_in_doubt(
    ends: tuple[lone.Line, socket.socket], operation: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no error of the line: a put that was sent, and then goes the long way, would be put twice."""
    line, far = ends

    def handler(*_: object) -> None:
        raise error

    monkeypatch.delattr(Struck, "recv_into" if operation == "sendmsg" else "sendmsg")
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with Struck(fileno=line.socket.detach()) as struck:
            line.socket = struck
            far.sendall(b"\0")
            together = asked("a", "a", "b")
            with pytest.raises(type(error), match="too late"):
                line.ask_all(together)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert all(isinstance(one.outcome, InDoubt) for one in together)
    assert line.ended


def test_an_error_is_told_to_those_whose_put_it_ended_and_to_nobody_else(
    ends: tuple[lone.Line, socket.socket],
) -> None:
    """Each raises one of its own, for they are raised in several threads."""
    line, far = ends
    far.sendall(answers(encode_error(DiskFull("no room")), {"result": {"first": 7, "count": 1}}))
    first, second, other = together = asked("a", "a", "b")
    line.ask_all(together)
    assert isinstance(first.outcome, DiskFull)
    assert isinstance(second.outcome, DiskFull)
    assert first.outcome is not second.outcome
    assert isinstance(other.outcome, lone.Reply)
    assert not line.ended


@pytest.mark.parametrize(
    "settings",
    [
        *({"limit_messages": 3, "on_overflow": policy} for policy in ("reject", "drop_oldest", "drop_newest", "block")),
        {"limit_bytes": 3},
        {"ttl_s": 60},
    ],
)
def test_where_there_is_room_for_a_few_all_go_the_long_way(owner: qflow.Broker, settings: dict[str, Any]) -> None:
    """None was put, and none dropped for them: there each is asked for by itself."""
    queue = owner.declare_queue("jobs")
    queue.put(b"first")
    line = lone.make_line(open_socket(owner.path), owner.path, str(owner.uuid))
    assert line is not None
    with closing(line):
        owner.alter_queue("jobs", **settings)
        together = asked(*["jobs"] * 5)
        line.ask_all(together)
        assert [one.outcome for one in together] == [lone.NOT_MADE] * 5
        assert [delivery.body for delivery in queue.get_many(9, 0)] == [b"first"]
