"""What users see of the objects they get: with `dir` and `help`, what the reference names, and no constructor."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from drivers import DOOR, OWNER
from qflow import options
from qflow.config import BrokerSettings, QueueSettings, StreamSettings
from qflow.settings import Setting

ROOT = Path(__file__).parent.parent
SEQUENCE = "count index "
"""What `Sequence` brings."""
OF_DELIVERY = "body headers topic sequence queue delivery_count redelivered expires_at_s ack nack extend "
OF_STREAMS = "stream partition offset key time_ms "
GETS = "get get_nowait get_many "
SUBSCRIBER = GETS + "ack seek position positions lag stats close closed name filter stream "
QUEUE = GETS + (
    "name settings put put_nowait put_many submit ack_many browse purge delete delete_many consume stats on_slow_consumer pause "
    "resume "
)
TRANSACTION = "put put_many publish ack ack_many commit rollback result "
SETTINGS = "path closed recovery "
SCHEDULES = "schedule schedules cancel_schedule "
QUEUES = SCHEDULES + "declare_queue declare_queues queue queues alter_queue delete_queue bind unbind redrive "
STREAMS = "declare_stream stream streams alter_stream delete_stream subscribe delete_subscription "
BROKER = (
    SETTINGS + QUEUES + STREAMS + "publish publish_many submit_publish transaction on_event stats check snapshot "
    "compact close "
)
SURFACE = {
    qflow.Broker: BROKER + "uuid settings ",
    qflow.Queue: QUEUE,
    qflow.Consumer: "running stop close ",
    qflow.Transaction: TRANSACTION,
    qflow.Stream: "query last stats ",
    qflow.StreamMessage: OF_STREAMS + "body headers topic ",
    qflow.Subscription: SUBSCRIBER,
    qflow.RemoteStream: "query last stats ",
    qflow.RemoteSubscription: SUBSCRIBER,
    qflow.RemoteTransaction: TRANSACTION,
    qflow.PublishResult: SEQUENCE + "offsets sequences partitions duplicate ",
    qflow.aio.AsyncBroker: BROKER + "uuid settings figures ",
    qflow.aio.AsyncQueue: QUEUE + "iterate ",
    qflow.aio.AsyncDelivery: OF_DELIVERY + "delivery ",
    qflow.aio.AsyncDeliveries: SEQUENCE + "bodies sequences ack nack extend deliveries ",
    qflow.aio.AsyncStreamDelivery: OF_DELIVERY + OF_STREAMS + "delivery ",
    qflow.aio.AsyncStreamDeliveries: SEQUENCE + "bodies sequences topics offsets ack nack extend deliveries ",
    qflow.aio.AsyncConsumer: "running stop close ",
    qflow.aio.AsyncStream: "name settings query last stats ",
    qflow.aio.AsyncSubscription: SUBSCRIBER + "iterate ",
    qflow.aio.AsyncTransaction: TRANSACTION,
    qflow.aio.AsyncRemoteBroker: BROKER + "uuid settings figures ",
    qflow.aio.AsyncRemoteQueue: QUEUE + "iterate length ",
    qflow.aio.AsyncRemoteStream: "settings query last stats ",
    qflow.aio.AsyncRemoteSubscription: SUBSCRIBER + "iterate ",
    qflow.aio.AsyncRemoteTransaction: TRANSACTION,
}
MADE_OF_THEIR_LIKES = {
    qflow.aio.AsyncBroker,  # of a broker for threads: that is for users
    qflow.aio.AsyncDelivery,
    qflow.aio.AsyncDeliveries,
    qflow.aio.AsyncStreamDelivery,
    qflow.aio.AsyncStreamDeliveries,
}


@pytest.mark.parametrize("kind", SURFACE)
def test_an_object_shows_what_users_call(kind: type) -> None:
    """A name that is added is public for good: it belongs into this list, and into the reference."""
    shown = {name for name in dir(kind) if not name.startswith("_")}
    assert shown == set(SURFACE[kind].split())


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_a_delivery_shows_what_users_call(open_spool: Callable[..., Any], access: str) -> None:
    """To `dir`, and so to completion: the rest of it is for the rooms that hold and settle it."""
    broker = open_spool()
    queue, _ = broker.declare_queue("jobs"), broker.declare_stream("s", topics=["t"])
    queue.put_many([b"a", b"b", b"c"])
    with broker.subscribe("s") as subscription:
        broker.publish_many([("t", b"a"), ("t", b"b"), ("t", b"c")])
        for one, names in [
            (queue.get(), OF_DELIVERY),
            (queue.get_many(2), SEQUENCE + "bodies sequences ack nack extend "),
            (subscription.get(), OF_DELIVERY + OF_STREAMS),
            (subscription.get_many(2), SEQUENCE + "bodies sequences topics offsets ack nack extend "),
        ]:
            assert {name for name in dir(one) if not name.startswith("_")} == set(names.split())


SETTINGS_OF = {
    "broker": (BrokerSettings, options.BrokerOptions, (options.BrokerOptions,)),
    "queue": (QueueSettings, options.QueueOptions, (options.QueueChanges, options.QueueOptions)),
    "stream": (StreamSettings, options.StreamOptions, (options.Retention, options.StreamOptions)),
}
"""Of what -> how they are parsed, as which arguments they are given, and the docstrings that say what each is."""


@pytest.mark.parametrize("what", SETTINGS_OF)
def test_a_setting_is_parsed_typed_explained_and_in_the_reference(what: str) -> None:
    """Each once; and the reference says which may differ when a queue is declared again."""
    settings, given, explaining = SETTINGS_OF[what]
    fields: dict[str, Setting] = settings.fields
    assert given.__required_keys__ | given.__optional_keys__ == fields.keys()
    # Python 3.13 keeps docstrings without what all their lines begin with, earlier ones as they are written.
    texts = [inspect.cleandoc(kind.__doc__ or "") for kind in explaining]
    explained = [re.findall(r"^([a-z_]+(?:, [a-z_]+)*): ", text, re.M) for text in texts]
    assert sorted(name for lines in explained for line in lines for name in line.split(", ")) == sorted(fields)
    text = (ROOT / "docs" / "reference" / "index.md").read_text()
    rows = re.findall(rf"^\| (`[a-z_`, ]+`) \| {what} \| ([a-z]*) ?\| ", text, re.M)
    told = {name.strip("`"): kind for names, kind in rows for name in names.split(", ")}
    kinds = {name: "performance" if one.is_performance else "behaviour" for name, one in fields.items()}
    assert told == (dict.fromkeys(fields, "") if what == "broker" else kinds)


def test_what_cannot_be_changed_of_a_queue_and_a_stream_is_no_argument_of_a_change() -> None:
    """All other settings are."""
    assert options.QueueChanges.__optional_keys__ == QueueSettings.fields.keys() - {"durable", "priorities"}
    assert options.StreamChanges.__optional_keys__ == StreamSettings.fields.keys() - {"partitions"}


ALIKE = [
    (qflow.Broker, qflow.RemoteBroker, qflow.aio.AsyncBroker, qflow.aio.AsyncRemoteBroker),
    (qflow.Queue, qflow.RemoteQueue, qflow.aio.AsyncQueue, qflow.aio.AsyncRemoteQueue),
    (qflow.Stream, qflow.RemoteStream, qflow.aio.AsyncStream, qflow.aio.AsyncRemoteStream),
    (
        qflow.Subscription,
        qflow.RemoteSubscription,
        qflow.aio.AsyncSubscription,
        qflow.aio.AsyncRemoteSubscription,
    ),
    (qflow.Transaction, qflow.RemoteTransaction, qflow.aio.AsyncTransaction, qflow.aio.AsyncRemoteTransaction),
]


@pytest.mark.parametrize("kinds", ALIKE, ids=lambda kinds: kinds[0].__name__)
def test_a_call_takes_the_same_arguments_of_threads_and_tasks_in_the_owner_and_at_the_door(
    kinds: tuple[type, ...],
) -> None:
    """But for options that are named in a class of their own."""
    for name in SURFACE.get(kinds[0], "").split():
        taken = [_arguments(getattr(kind, name)) for kind in kinds if callable(getattr(kind, name, None))]
        if not any("**" in one for one in taken):
            assert all(one == taken[0] for one in taken), name


def _arguments(call: object) -> dict[str, object]:
    assert callable(call)
    found = list(inspect.signature(call).parameters.values())[1:]
    return {"**" if one.kind is one.VAR_KEYWORD else one.name: one.default for one in found}


CALLED = [
    *SURFACE,
    qflow.Delivery,
    qflow.Deliveries,
    qflow.StreamDelivery,
    qflow.StreamDeliveries,
    qflow.RemoteBroker,
    qflow.RemoteQueue,
]


@pytest.mark.parametrize("kind", CALLED)
def test_a_method_is_called_after_the_class_that_its_users_know(kind: type) -> None:
    """Errors and `help` say `Queue.put()`, and never the name of a class that it has the method from."""
    for name in dir(kind):
        one = inspect.getattr_static(kind, name)
        if not name.startswith("_") and inspect.isfunction(one) and one.__module__.startswith("qflow"):
            assert one.__qualname__ == f"{kind.__name__}.{name}"


def test_a_function_is_called_by_the_name_that_its_users_know() -> None:
    for module in (qflow, qflow.aio):
        for name in module.__all__:
            one = getattr(module, name)
            assert not inspect.isfunction(one) or one.__qualname__ == name


@pytest.mark.parametrize(
    ("kind", "maker"),
    [(qflow.Broker, "qflow.open"), (qflow.Queue, "Broker.declare_queue"), (qflow.Subscription, "Broker.subscribe")],
)
def test_a_class_that_is_called_says_what_makes_its_objects(kind: type, maker: str) -> None:
    """It made one without parts, whose repr was the first to fail."""
    for arguments in [(), ("jobs",)]:
        with pytest.raises(TypeError, match=f"^a {kind.__name__} is made by `{maker}`"):
            kind(*arguments)


@pytest.mark.parametrize("kind", [kind for kind in SURFACE if kind not in MADE_OF_THEIR_LIKES])
def test_what_a_call_makes_shows_no_constructor_of_parts(kind: type) -> None:
    """Its parts are no matter of users, who get it from a method of something else."""
    assert all(vars(one).get("__init__") is None for one in kind.__mro__ if one.__module__.startswith("qflow"))


def test_the_package_shows_what_users_import() -> None:
    """Not the modules that something has imported meanwhile."""
    script = "import qflow, qflow.aio, qflow.inspect; qflow.open; print(*dir(qflow)); print(*dir(qflow.aio))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    package, tasks = run.stdout.splitlines()
    assert set(package.split()) == {*qflow.__all__, "__version__", "aio", "inspect"}
    assert set(tasks.split()) == set(qflow.aio.__all__)


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused_with_a_sentence(system: str) -> None:
    """Not with what the first missing function of theirs would raise."""
    with pytest.raises(ImportError, match=f"qflow runs on Linux, and this is '{system}': use WSL 2"):
        qflow._check_platform(system)
