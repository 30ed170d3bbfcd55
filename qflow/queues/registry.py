"""All queues of a broker: declared, found again, altered, bound, deleted.

In the log each durable queue has a record and rows, under a number of its own. What changes a queue's record is done by
one thread at a time, which holds `Spool.changing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeVar

from qflow.collector import making_many
from qflow.config import QueueSettings, check_name
from qflow.errors import (
    BrokerClosed,
    CorruptionError,
    InvalidArgument,
    NotFound,
    QueueDeleted,
    StorageError,
)
from qflow.events import Teller
from qflow.identity import new_number, of_another_broker
from qflow.importing import importing
from qflow.memory.ledger import Ledger
from qflow.memory.waiting import collecting, straight
from qflow.names import command
from qflow.queues.context import Tick
from qflow.queues.dead_letter_router import DeadLetterRouter
from qflow.queues.dead_letters import check_durable, check_no_cycle
from qflow.queues.dedupe import Keys
from qflow.queues.making import Maker, end, give_parts, is_used, shared_by
from qflow.queues.queue import Queue, context_of, disown, parts_of
from qflow.queues.tending import alter, altered, check_open, let_go, settle_down
from qflow.spool import Spool
from qflow.storage.log import recovery
from qflow.storage.log.records import NewRecord
from qflow.storage.log.recovery import BINDINGS, QueueRecord
from qflow.storage.log.rows import Row

T = TypeVar("T")
TRANSIENT_OWNERS = 2**31
"""Queues that are not durable have numbers from here on; the log never sees them."""
QUIET_S = 10.0
"""How long an end waits for puts that have reserved room and not joined a batch yet."""
PATIENCE_S = 1
"""How long the declaring of a dead-letter queue waits for who changes queues now."""
AT_ONCE = 5
"""Queues that are made before others are let pass: 0.3 to 1 ms."""


class Bindings(Protocol):
    """Which topics lead to a queue: `Routing`."""

    def bind(self, queue: Queue, topic_filter: str) -> bool: ...
    def unbind(self, queue: Queue, topic_filter: str) -> bool: ...
    def replace(self, queue: Queue, filters: list[str]) -> None: ...
    def filters_of(self, queue: Queue) -> list[str]: ...


class Queues:
    """See the module. Looking is for any thread."""

    def __init__(self, spool: Spool, ledger: Ledger, bindings: Bindings, tell: Teller) -> None:
        self._spool = spool
        self._bindings = bindings
        self._queues: dict[str, Queue] = {}  # changed under `Spool.changing`; a copy is one step of CPython
        self._sources: dict[str, dict[str, None]] = {}  # which queues name it for their dead letters
        self._broken: dict[str, QueueRecord] = {}
        """Records that cannot be served."""
        self._incarnations: dict[int, int] = {}
        self._new_incarnations = count(new_number() >> 1)  # of numbers that no other opening has
        self._transient_owners = count(TRANSIENT_OWNERS + 1)
        self._news: dict[Queue, None] = {}
        self.deleted: list[int] = []
        """Numbers of what was deleted, for maintenance to clear away."""
        self.router = DeadLetterRouter(spool, self._for_dead_letters, tell)
        self.keys = Keys(spool.log, self.router.together, spool.clock, spool.monotonic)
        self.tick = Tick(spool.monotonic())
        self._let_pass = spool.log.let_pass
        self._maker = Maker(spool, ledger, shared_by(spool, self.tick, tell, self.router, self.keys))
        self.changed = self._maker.changed
        """Which queues have changed, for maintenance, which takes them."""

    # Found again -------------------------------------------------------------------------------------------------

    def recover(self, records: list[QueueRecord], *, clean: bool) -> list[str]:
        """Take over what the log holds; return what cannot be served, in words: it stays in the log."""
        problems: list[str] = []
        for record in records:
            if record.deleted:
                self.deleted.append(record.owner)
            elif record.rows is None:
                self._broken[record.name] = record
            else:
                try:
                    settings = QueueSettings.from_dict(record.settings)
                except InvalidArgument as error:  # a setting of a later version
                    self._broken[record.name] = record
                    problems.append(f"queue {record.name!r} cannot be served: {error}")
                else:
                    self._recover(record, settings, record.rows, clean)
        return problems

    def _recover(self, record: QueueRecord, settings: QueueSettings, rows: dict[int, Row], clean: bool) -> None:
        if not clean:
            rows = {number: row._replace(doubtful=row.next) for number, row in rows.items()}
        self._register(record.name, settings, record.owner, record.incarnation, rows)
        for topic_filter in record.settings.get(BINDINGS, ()):
            self._bindings.bind(self._queues[record.name], topic_filter)

    # Declaring and altering --------------------------------------------------------------------------------------

    @straight
    def declare_at_once(self, name: str, settings: QueueSettings) -> Queue | None:
        """Return the queue of this name, made if it is missing, where that writes nothing and asks nobody.

        None where it does: nothing was done then. See `declare`.
        """
        spool, queues = self._spool, self._queues
        spool.check_open()
        queue = queues.get(name)
        if queue is not None:
            return queue if queue.settings == settings and context_of(queue).ended is None else None
        if settings.durable or settings.dead_letter is not None or type(name) is not str:
            return None
        queue = self._maker.make(name, settings, next(self._transient_owners), next(self._new_incarnations), None)
        with spool.changing:  # a straight line; see `waiting`
            if spool.closed or spool.records.unsure or collecting:
                return None
            if name in queues or name in self._broken or name in self._sources:
                return None
            queues[name] = queue
            self._news[queue] = None
        return queue

    def declare(self, names: list[str], settings: QueueSettings) -> list[Queue]:
        """Return the queues of these names, making those that are missing; see `Broker.declare_queues`."""
        with self._spool.changing:
            return self._declare(names, settings)

    def _declare(self, names: list[str], settings: QueueSettings) -> list[Queue]:
        """Return queues of these settings. Holding `changing`."""
        self._spool.check_open()
        self._spool.records.make_sure()
        missing: list[str] = []
        for name in dict.fromkeys(names):
            queue = self._queues.get(name)
            if queue is not None and context_of(queue).was_deleted:
                self._clear_away(queue)  # that was begun, and interrupted
                queue = None
            if queue is not None:
                queue.settings.check_same(settings, "queue", name)
            elif name in self._broken:
                raise self._broken_error(name)
            else:
                self._check_dead_letters(name, settings)
                missing.append(name)
        with making_many(len(missing)):
            self._add(missing, settings)
        queues = [self._queues[name] for name in names]
        for queue in queues:
            if queue.settings != settings:
                self._alter(queue, settings)
        return queues

    def ready(self, queues: Sequence[Queue]) -> Sequence[Queue]:
        """Give queues their parts, for an event loop, which is not to wait for that; return them."""
        with making_many(len(queues)):
            for queue in self._passing(queues):
                give_parts(queue)
        return queues

    def _add(self, names: list[str], settings: QueueSettings) -> None:
        """Make queues, durable ones in one commit. Holding `changing`."""
        records: list[NewRecord] = []
        calls: list[Callable[[], None]] = []
        for name in self._passing(names):
            incarnation = next(self._new_incarnations)
            if settings.durable:
                owner, rows = self._spool.new_owner(), {0: Row()}
                records.append(NewRecord(owner, recovery.queue_value(name, incarnation, settings.to_dict()), rows))
                calls.append(partial(self._register, name, settings, owner, incarnation, rows))
            else:
                self._register(name, settings, next(self._transient_owners), incarnation, None)
        if records:
            self._spool.records.add(records, partial(self._call_all, calls))

    def _call_all(self, calls: list[Callable[[], None]]) -> None:
        for call in self._passing(calls):
            call()

    def _passing(self, items: Iterable[T]) -> Iterator[T]:
        """Yield all of these; behind every few, others are let pass."""
        for number, item in enumerate(items, 1):
            yield item
            if not number % AT_ONCE:
                self._let_pass()

    def _register(
        self, name: str, settings: QueueSettings, owner: int, incarnation: int, rows: dict[int, Row] | None
    ) -> None:
        """Have a new queue made and known; twice is fine. Holding `changing`."""
        if name in self._queues:
            return
        if rows is not None:
            self._incarnations[owner] = incarnation
        queue = self._queues[name] = self._maker.make(name, settings, owner, incarnation, rows)
        self._news[queue] = None
        self._note_source(name, settings.dead_letter)

    def _note_source(self, name: str, target: str | None, before: str | None = None) -> None:
        """A queue names another one for its dead letters, and named one before; twice is fine."""
        if before is not None and before in self._sources:
            self._sources[before].pop(name, None)
            if not self._sources[before]:
                del self._sources[before]
        if target is not None:
            self._sources.setdefault(target, {})[name] = None

    def _target_of(self, name: str) -> str | None:
        """Return which queue this one names for its dead letters."""
        queue = self._queues.get(name)
        return None if queue is None else queue.settings.dead_letter

    def _check_dead_letters(self, name: str, settings: QueueSettings) -> None:
        """Refuse cycles, and a durable queue whose dead letters a restart would lose. Holding `changing`."""
        check_no_cycle(name, settings.dead_letter, self._target_of)
        target = self._queues.get(settings.dead_letter) if settings.dead_letter is not None else None
        if target is not None:
            check_durable(name, settings, target.settings)
        for other in self._sources.get(name, ()):
            check_durable(other, self._queues[other].settings, settings)

    def _for_dead_letters(self, name: str) -> Queue:
        """Return a queue that others name for their dead letters, declaring it if it is missing."""
        queue = self._queues.get(name)
        if queue is not None:
            return queue
        changing = self._spool.changing
        if not changing.acquire(timeout=PATIENCE_S):  # the broker may be closing, and wait for who calls this
            raise StorageError(f"the dead-letter queue {name!r} could not be declared now")
        try:
            queue = self._queues.get(name)
            if queue is not None:
                return queue
            durable = any(self._queues[source].settings.durable for source in self._sources.get(name, ()))
            return self._declare([name], QueueSettings(durable=durable))[0]
        finally:
            changing.release()

    def alter(self, name: Queue | str, changes: dict[str, Any]) -> Queue:
        """Change settings of a queue; see `Broker.alter_queue`."""
        with self._spool.changing:
            self._spool.check_open()
            self._spool.records.make_sure()
            queue = self.own(name)
            settings = altered(queue.settings, changes)
            self._check_dead_letters(queue.name, settings)
            self._alter(queue, settings)
            return queue

    def _alter(self, queue: Queue, settings: QueueSettings) -> None:
        """Write and apply other settings. Holding `changing`."""
        if settings.durable:
            value = self._record_of(queue, settings)
            self._spool.records.replace(_owner(queue), value, partial(self._apply, queue, settings))
        else:
            self._apply(queue, settings)

    def _apply(self, queue: Queue, settings: QueueSettings) -> None:
        self._note_source(queue.name, settings.dead_letter, before=queue.settings.dead_letter)
        alter(parts_of(queue), settings)

    def _record_of(self, queue: Queue, settings: QueueSettings) -> bytes:
        filters = self._bindings.filters_of(queue)
        values = settings.to_dict() | ({BINDINGS: filters} if filters else {})
        return recovery.queue_value(queue.name, self._incarnations[_owner(queue)], values)

    def bind(self, queue: Queue | str, topic_filter: str) -> None:
        """Send what is published to matching topics to a queue, too; see `Broker.bind`."""
        self._rebind(queue, topic_filter, self._bindings.bind)

    def unbind(self, queue: Queue | str, topic_filter: str) -> None:
        """Undo `bind`."""
        self._rebind(queue, topic_filter, self._bindings.unbind)

    def _rebind(self, queue: Queue | str, topic_filter: str, change: Callable[[Queue, str], bool]) -> None:
        with self._spool.changing:
            self._spool.check_open()
            self._spool.records.make_sure()
            found = self.own(queue)
            before = self._bindings.filters_of(found)
            if change(found, topic_filter) and found.settings.durable:
                undo = partial(self._bindings.replace, found, before)
                self._spool.records.replace(_owner(found), self._record_of(found, found.settings), undo=undo)

    # Deleting ----------------------------------------------------------------------------------------------------

    def delete(self, name: Queue | str) -> None:
        """Delete a queue with all its messages; see `Broker.delete_queue`."""
        with self._spool.changing:
            self._spool.check_open()
            records = self._spool.records
            records.make_sure()
            name = self.own(name).name if isinstance(name, Queue) else name
            broken = self._broken.get(check_name(name))
            if broken is not None:
                records.delete([broken.owner], partial(self._forget_broken, name, broken.owner))
                return
            queue = self.get(name)
            self._spool.used.check("queue", name)
            end, clear_away = partial(self._end, queue), partial(self._clear_away, queue)
            if queue.settings.durable:
                records.delete([_owner(queue)], clear_away, at_once=end)
            else:
                end()
                clear_away()

    def _forget_broken(self, name: str, owner: int) -> None:
        if self._broken.pop(name, None) is not None:
            self.deleted.append(owner)

    def _end(self, queue: Queue) -> None:
        """Let nobody use a queue that is deleted; twice is fine. By whoever commits, or holding `changing`."""
        self._bindings.replace(queue, [])  # first, so that who is refused finds it no more
        end(queue, QueueDeleted)

    def _clear_away(self, queue: Queue) -> None:
        """Let go of a queue that has ended. Holding `changing`."""
        if self._queues.pop(queue.name, None) is None:
            return  # the second time
        self._news[queue] = None
        self._note_source(queue.name, None, before=queue.settings.dead_letter)
        if not is_used(queue):
            return
        parts_of(queue).gate.account.give_way = None
        self.router.together.leave_deleted()
        log = self._spool.log
        try:
            settle_down(parts_of(queue), log.drain, QUIET_S)
        finally:
            let_go(parts_of(queue))
            self.changed.leave(parts_of(queue).gate.place)
            parts_of(queue).spiller.area.remove()
            if queue.settings.durable:
                self._incarnations.pop(_owner(queue), None)
                self.keys.forget(_owner(queue))
                log.forget(parts_of(queue).logged_lanes)
                self.deleted.append(_owner(queue))

    # Looking -----------------------------------------------------------------------------------------------------

    def own(self, queue: Queue | str) -> Queue:
        """Return a queue of this broker, given itself or by name.

        Raises:
            NotFound, CorruptionError: as `get`. QueueDeleted: it was deleted.
            InvalidArgument: it is not a queue, or one of another broker.
        """
        if not isinstance(queue, Queue):
            return self.get(queue)
        found = self._queues.get(queue.name)
        if found is queue:
            return queue
        check_open(parts_of(queue))
        raise of_another_broker("queue", queue)

    def get(self, name: str) -> Queue:
        """Return a queue that exists; see `Broker.queue`."""
        self._spool.check_open()
        queue = self._queues.get(check_name(name))
        if queue is None and name in self._broken:
            raise self._broken_error(name)
        if queue is None:
            raise NotFound(f"there is no queue {name!r} in {self._spool.path}: declare it first")
        return queue

    def _broken_error(self, name: str) -> CorruptionError:
        return CorruptionError(
            f"queue {name!r} is in the log, but its record is damaged: see {command('check', self._spool.path)}; "
            "delete_queue removes it with its messages"
        )

    def names(self) -> list[str]:
        """Return the names of all queues, sorted."""
        self._spool.check_open()
        return sorted(self._queues)

    def named(self) -> dict[str, Queue]:
        """Return all queues by name."""
        return dict(self._queues)

    def all(self) -> list[Queue]:
        """Return all queues."""
        return list(self._queues.values())

    def used(self) -> list[Queue]:
        """Return all queues but those that nobody has used, which there is nothing to do with."""
        return [queue for queue in self.all() if is_used(queue)]

    def take_news(self) -> set[Queue]:
        """Return which were declared or deleted since this was asked. For `Figures`."""
        news = set()
        while self._news:
            news.add(self._news.popitem()[0])
        return news

    def has(self, queue: Queue) -> bool:
        """Tell whether a queue was not deleted."""
        return self._queues.get(queue.name) is queue

    def problems(self) -> list[str]:
        """Return what does not agree, in words."""
        with importing:
            from qflow.queues.checking import problems  # which few need

        found = [f"queue {name!r} has a damaged record and is not served" for name in sorted(self._broken)]
        for queue in self._passing(self.used()):
            found += problems(parts_of(queue))
        return found

    # Ending ------------------------------------------------------------------------------------------------------

    def end(self) -> list[Queue]:
        """Let nobody use any queue, as the broker is being closed; return those that were used."""
        return [queue for queue in self.all() if end(queue, BrokerClosed)]

    def die(self, stub: Any) -> None:
        """In a forked child: refuse everything."""
        for queue in self._queues.values():
            disown(queue, stub)
            context_of(queue).maker = None  # so that a look at one without parts asks for them


def _owner(queue: Queue) -> int:
    return context_of(queue).owner
