"""What a client settles of batches of which the owner has settled some already, unknown to the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import qflow
from qflow.remote.client import transaction_requests
from qflow.remote.client.transaction_requests import Draft
from qflow.remote.server.operations import publishing

COUNT = 10


class Interrupted(BaseException):
    """What a signal handler raises."""


def interrupted(draft: Draft, result: list[Any]) -> list[Any]:
    """Come as the answer of a commit is there and nothing is noted of it."""
    raise Interrupted


def got(owner: qflow.Broker, remote: qflow.RemoteBroker, kind: str) -> tuple[Any, Any]:
    """Return a batch of a queue or a stream, and whose it is."""
    if kind == "queue":
        owner.declare_queue("q").put_many([b"%d" % number for number in range(COUNT)])
        queue = remote.queue("q")
        return queue.get_many(COUNT), queue
    owner.declare_stream("s", topics=["s"])
    owner.publish_many([("s", b"%d" % number) for number in range(COUNT)])
    subscription = remote.subscribe("s", start="earliest", name="n")
    return subscription.get_many(COUNT), subscription


def held(whose: Any) -> int:
    stats = whose.stats()
    return int(getattr(stats, "acquired_messages", 0) + getattr(stats, "unsettled_messages", 0))


@pytest.mark.parametrize("kind", ["queue", "stream"])
@pytest.mark.parametrize("how", ["ack", "reject", "extend"])
def test_the_others_are_settled_where_some_were_before(
    owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    """Those that a commit has settled, of which the client does not know that it was made."""
    batch, whose = got(owner, remote, kind)
    with monkeypatch.context() as patch:
        patch.setattr(Draft, "committed", interrupted)
        with pytest.raises(Interrupted), remote.transaction() as tx:
            tx.ack_many(batch[:3])
    for delivery in batch[4:9]:
        delivery.ack(wait=True)
    assert held(whose) == 2
    if how == "extend":
        batch.extend(60)
        assert held(whose) == 2
        return
    with pytest.raises(qflow.AlreadySettled):
        batch.ack(wait=True) if how == "ack" else batch.nack(requeue=False)
    assert held(whose) == 0


@pytest.mark.parametrize("kind", ["queue", "stream"])
@pytest.mark.parametrize("side", ["owner", "client"])
def test_what_was_settled_before_is_named_though_nothing_is_kept_of_it(
    owner: qflow.Broker, remote: qflow.RemoteBroker, kind: str, side: str
) -> None:
    """By one ack after the other, with its batch, and by a transaction."""
    broker: Any = owner if side == "owner" else remote
    batch, _ = got(owner, broker, kind)
    third = f"message {batch[3].sequence} of {kind}"
    for delivery in batch[:9]:
        delivery.ack()
    with pytest.raises(qflow.AlreadySettled, match=third):
        batch[3].ack()
    batch.ack()
    with pytest.raises(qflow.AlreadySettled, match=third), broker.transaction() as tx:
        tx.ack(batch[3])
    with pytest.raises(qflow.AlreadySettled, match=third if side == "client" else "this batch of"):
        batch[3].ack()


def test_a_transaction_compares_no_delivery_with_all_before_it(
    owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen thousand took five seconds, in which nobody else could use the connection."""
    compared: list[int] = []

    class Index(int):
        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return int.__eq__(self, other)

        __hash__ = int.__hash__

    place = transaction_requests._place

    def counted(delivery: object) -> tuple[Any, Any]:
        batch, index = place(delivery)
        return batch, None if index is None else Index(index)

    monkeypatch.setattr(transaction_requests, "_place", counted)
    batch, whose = got(owner, remote, "queue")
    with remote.transaction() as tx:
        tx.ack_many(list(batch)[:-1])
        assert len(compared) <= COUNT
        with pytest.raises(qflow.AlreadySettled):
            tx.ack(batch[0])
        with pytest.raises(qflow.AlreadySettled):
            tx.ack_many([batch[-1], batch[-1]])
        tx.ack(batch[-1])
    assert held(whose) == 0


def test_others_have_their_turn_between_the_steps_of_a_transaction(
    owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty thousand acks one by one, which came as one request, held up all clients of the door for a second."""
    done: list[str] = []
    ack = publishing._ack

    async def noting(*arguments: Any) -> int:
        if not done:
            asyncio.get_running_loop().call_soon(done.append, "another")
        done.append("ack")
        return await ack(*arguments)

    monkeypatch.setattr(publishing, "_ack", noting)
    monkeypatch.setattr(publishing, "STEPS_AT_ONCE", 4, raising=False)
    batch, whose = got(owner, remote, "queue")
    with remote.transaction() as tx:
        for delivery in batch:
            tx.ack(delivery)
    assert done == ["ack"] * 4 + ["another"] + ["ack"] * (COUNT - 4)
    assert held(whose) == 0
