"""Many queues: what is done for one of them, or each second, looks at that one and at no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import qflow
from qflow.streams.topic_filter import FilterTrie

MANY = 200


class Unlisted(dict[Any, Any]):
    """Values that may be looked up, and not gone through."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("all of them are looked at")

    __iter__ = items = values = keys = copy = _refuse


def test_a_declaration_looks_at_no_other_queue(open_at: Callable[..., qflow.Broker]) -> None:
    """But at those that name it for their dead letters, or that it names."""
    broker = open_at()
    for n in range(MANY):
        broker.declare_queue(f"q{n}", durable=n < 2)
    queues = broker.engine.queues
    queues._queues = Unlisted(queues._queues)
    broker.declare_queue("new", durable=False, dead_letter="dead")
    broker.declare_queue("logged", dead_letter="dead letters")
    broker.declare_queue("dead", durable=False)
    with pytest.raises(qflow.InvalidArgument, match="'logged' is durable"):
        broker.declare_queue("dead letters", durable=False)
    with pytest.raises(qflow.InvalidArgument, match="cycle"):
        broker.alter_queue("dead", dead_letter="new")
    broker.alter_queue("logged", dead_letter=None)
    broker.declare_queue("dead letters", durable=False)
    broker.delete_queue("q7")
    queues._queues = dict(dict.items(queues._queues))


def test_who_named_a_dead_letter_queue_and_was_deleted_does_so_no_more(open_at: Callable[..., qflow.Broker]) -> None:
    """Its name is free for a queue that is not durable."""
    broker = open_at()
    broker.declare_queue("first", dead_letter="dead")
    broker.declare_queue("second", dead_letter="dead")
    broker.delete_queue("first")
    with pytest.raises(qflow.InvalidArgument, match="'second' is durable"):
        broker.declare_queue("dead", durable=False)
    broker.delete_queue("second")
    broker.declare_queue("dead", durable=False)


def test_a_binding_goes_through_no_other(open_at: Callable[..., qflow.Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue knows its own filters, in their order, also after one went and after the queue was deleted."""
    broker = open_at()
    for n in range(MANY):
        broker.bind(broker.declare_queue(f"q{n}", durable=False), f"a/{n}/+")
    queue = broker.declare_queue("queue")
    with monkeypatch.context() as patch:
        patch.setattr(FilterTrie, "__iter__", Unlisted._refuse)
        patch.setattr(FilterTrie, "_nodes", Unlisted._refuse)
        for topic_filter in ("b/#", "a/1/2", "a/+/3", "b/#"):
            broker.bind(queue, topic_filter)
        broker.unbind(queue, "a/1/2")
        broker.delete_queue("q8")
    bindings = broker.engine.routing
    assert bindings.filters_of(queue) == ["b/#", "a/+/3"]
    assert sorted(broker.publish("a/3/3", b"x").sequences) == ["q3", "queue"]
    assert broker.publish("a/8/4", b"x").sequences == {}
    broker.close()
    again = open_at()
    assert again.engine.routing.filters_of(again.queue("queue")) == ["b/#", "a/+/3"]
