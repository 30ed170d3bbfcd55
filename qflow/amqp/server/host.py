"""Virtual hosts while the server runs: what clients declare and delete, in the log and in the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.arguments import QUORUM
from qflow.amqp.model.plans import Plan
from qflow.amqp.model.queues import place_of
from qflow.amqp.model.topology import Topology
from qflow.amqp.server.changes import Change, Changes
from qflow.amqp.server.dead_letters import TOO_MANY, DeadLetters, Trimming
from qflow.amqp.server.hosted import Consuming, HostedQueue, expiring_of
from qflow.amqp.server.stores import QueueStore, StreamStore
from qflow.broker import Broker
from qflow.errors import CorruptionError, NotFound, QflowError, QueueFull
from qflow.loggers import get_logger
from qflow.serving.tasks import Tasks, ending, to_its_end

if TYPE_CHECKING:
    from qflow.aio.broker import AsyncBroker
    from qflow.amqp.model.queues import Queue
    from qflow.amqp.model.tables import Table
    from qflow.amqp.model.vhost import VirtualHost
    from qflow.amqp.server.content import Properties
    from qflow.amqp.wire.frames import Content

LOOK_S = 1.0
"""How often unused queues are looked for."""

_logger = get_logger("qflow.amqp")


class Hosts:
    """All virtual hosts of a broker."""

    def __init__(self, broker: AsyncBroker) -> None:
        self.broker = broker
        self.tasks = Tasks(_logger)
        self.numbers = count(1)
        """Of connections: none is given twice."""
        self._users = 0
        self.changes = Changes(broker, self._keep)
        self.dead_letters = DeadLetters(broker, self.place_of, self.tasks)
        self._hosts: dict[str, Host] = {}
        self._topology: Topology | None = None

    @classmethod
    async def of(cls, broker: AsyncBroker) -> Hosts:
        """Return the virtual hosts of a broker, the same for all its servers; `leave` when they are not needed."""
        hosts = _HOSTS.get(broker.broker)
        if hosts is None:
            hosts = _HOSTS[broker.broker] = cls(broker)
        hosts._users += 1
        try:
            async with hosts.changes.alone():
                if hosts._topology is None:
                    await hosts._load()
                    hosts.tasks.spawn(hosts.dead_letters.run())
                    hosts.tasks.spawn(hosts._tick())
        except BaseException:
            await hosts.leave()
            raise
        return hosts

    async def leave(self) -> None:
        """Need them no more."""
        self._users -= 1
        if not self._users:
            if _HOSTS.get(self.broker.broker) is self:
                del _HOSTS[self.broker.broker]
            for host in self._hosts.values():
                host.end()
            await self.tasks.close()

    async def _load(self) -> None:
        """Take over what is in the log."""
        self._topology = topology = await asyncio.to_thread(Topology, self.broker.broker.engine.log, self.engine_has)
        for model in topology.vhosts:
            self._host(model).open()

    def engine_has(self, name: str, is_stream: bool) -> bool | None:
        engine = self.broker.broker.engine
        try:
            return bool(engine.streams.get(name).name) if is_stream else engine.queues.get(name).settings.durable
        except NotFound:
            return None
        except CorruptionError:
            return True

    async def find(self, name: str) -> Host:
        """Return a virtual host, which begins to be there when it is asked for."""
        assert self._topology is not None
        return self._hosts.get(name) or self._host(self._topology.vhost(name))

    def _host(self, model: VirtualHost) -> Host:
        host = self._hosts[model.name] = Host(self, model)
        return host

    def place_of(self, engine_name: str) -> tuple[Host | None, str]:
        """Return the virtual host and the name of a queue, given its name in the engine."""
        vhost, name = place_of(engine_name)
        return self._hosts.get(vhost), name

    async def commit(self, plan: Plan) -> None:
        """Have the records of a plan in the log, then make the change. Raises AmqpError: they are not in the log."""
        await self._keep(plan)
        plan.apply()

    async def _keep(self, plan: Plan) -> None:
        """Have the records of a plan in the log."""
        assert self._topology is not None
        if plan.facts:
            await asyncio.to_thread(self._topology.keep, plan)

    async def _tick(self) -> None:
        """Delete queues that nobody has used for as long as their arguments say, until the broker is closed."""
        while not self.broker.closed:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for host in list(self._hosts.values()):
                try:
                    await host.tick(now)
                except QflowError as error:
                    if self.broker.closed:
                        return
                    _logger.warning("unused queues are not deleted yet: %s", error)


_HOSTS: dict[Broker, Hosts] = {}
"""By broker; those of servers that run."""


class Host:
    """One virtual host."""

    def __init__(self, hosts: Hosts, model: VirtualHost) -> None:
        self.broker = hosts.broker
        self.queues: dict[str, HostedQueue] = {}
        """Those that were used since the server began."""
        self.what_is_full = ""
        """What publishers wait for, as those were told that were blocked last; until then others are told the same."""
        self.is_told_until_s = 0.0
        self._hosts = hosts
        self._model = model
        self.check_exchange = model.check_exchange
        self.trim_soon = Trimming(self, hosts.dead_letters, hosts.tasks).soon
        self._expiring: set[str] = {name for name, one in model.queues.items() if one.settled.expires_ms is not None}

    @property
    def name(self) -> str:
        """The name of the virtual host."""
        return self._model.name

    def open(self) -> None:
        """Have messages leave that expired while no server ran, where they become dead letters."""
        for name, model in self._model.queues.items():
            if model.settled.dead_letter_exchange is not None:
                try:
                    self._hosted(name)
                except AmqpError as error:  # whoever uses it is told
                    _logger.warning("what expires in it is looked for later: %s", error)

    def end(self) -> None:
        """Look for nothing any more: the server ends."""
        for hosted in self.queues.values():
            hosted.end()

    # Looking -----------------------------------------------------------------------------------------------------

    def queue(self, name: str, connection: int) -> HostedQueue:
        """Return a queue that a connection may use. Raises AmqpError: NOT_FOUND; RESOURCE_LOCKED: it is another's."""
        self._model.queue(name, connection)
        return self._hosted(name)

    def find(self, name: str) -> HostedQueue | None:
        """Return a queue; None if there is none."""
        hosted = self.queues.get(name)
        if hosted is not None and not hosted.store.is_gone:
            return hosted
        if self.broker.closed:
            raise AmqpError(ReplyCode.CONNECTION_FORCED, "the broker is closed")
        if not self._model.has_queue(name):
            return None
        try:
            return self._hosted(name)
        except AmqpError as error:
            if error.code != ReplyCode.NOT_FOUND:
                raise
            return None  # it is being deleted

    def _hosted(self, name: str) -> HostedQueue:
        found = self.queues.get(name)
        if found is None or found.store.is_gone:
            model, where = self._model.find_queue(name), self._model.where("queue", name)
            try:
                store = None if model is None else self._store(model)
            except NotFound:
                store = None
            except QflowError as error:
                raise AmqpError(ReplyCode.INTERNAL_ERROR, f"{where}: {error}") from error
            if model is None or store is None:
                raise AmqpError(ReplyCode.NOT_FOUND, f"no {where}")
            found = self.queues[name] = HostedQueue(
                model, where, store, expiring_of(model.settled, store, self._hosts.tasks)
            )
            found.look_for_expired()
        return found

    def _store(self, model: Queue) -> QueueStore | StreamStore:
        name = self._model.engine_name(model.name)
        if model.settled.is_stream:
            return StreamStore(model.name, name, self.broker.stream(name), self.broker)
        return QueueStore(model.name, self.broker.queue(name), counts=model.settled.queue_type == QUORUM)

    def route(
        self, exchange: str, keys: Sequence[str], properties: Properties, *, inside: bool = False
    ) -> list[HostedQueue]:
        """Return the queues that a message goes to, each once. Cost: 1 µs.

        Args:
            inside: it does not come from a client, so that internal exchanges take it.

        Raises:
            AmqpError: NOT_FOUND, ACCESS_REFUSED.
        """
        if not inside:
            self._model.publishing(exchange)
        names = self._model.route(exchange, keys[0], properties.headers, keys[1:])
        found = (self.find(name) for name in names)
        return [hosted for hosted in found if hosted is not None]

    def is_delayed(self, exchange: str) -> bool:
        """Tell whether an exchange holds messages back."""
        return bool(exchange) and self._model.exchange(exchange).is_delayed

    # Limits ------------------------------------------------------------------------------------------------------

    async def refuse(self, hosted: HostedQueue, content: Content) -> None:
        """Have a message go to the dead letters that a full queue does not take. Raises QueueFull: when it is there."""
        await self._hosts.dead_letters.bury(self, hosted.name, content, TOO_MANY)
        raise QueueFull(f"{hosted.where} is full")

    # Exchanges and bindings --------------------------------------------------------------------------------------

    @ending
    async def change(self, plan: Callable[[VirtualHost], Plan]) -> None:
        """Have what is planned in the log, then make the change; at once, where that changes nothing."""
        with suppress(AmqpError):  # it may be right when it is its turn
            planned = plan(self._model)
            if planned.is_nothing and (planned.exchange is None or not planned.exchange.auto_delete):
                return
        await self._hosts.changes.make(Change(self._model, plan))

    async def bind_queue(self, queue: str, exchange: str, key: str, arguments: Table, connection: int) -> None:
        def plan(model: VirtualHost) -> Plan:
            planned = model.plan_bind_queue(queue, exchange, key, arguments, connection)
            self._hosted(queue)  # 404 where a program has deleted it
            return planned

        await self.change(plan)

    async def bind_for_now(self, queue: str, exchange: str, key: str, *, bound: bool = True) -> None:
        """Have a binding, or have it no more, that the log knows nothing of."""
        async with self._hosts.changes.alone():
            plan = self._model.plan_bind_queue if bound else self._model.plan_unbind_queue
            plan(queue, exchange, key, {}, -1).apply()

    # Queues ------------------------------------------------------------------------------------------------------

    @ending
    async def declare_queue(
        self, connection: int, name: str, *, durable: bool, exclusive: bool, auto_delete: bool, arguments: Table
    ) -> HostedQueue:
        """Return a queue, making it if there is none; the server names one without a name."""
        declare = partial(
            self._model.plan_declare_queue,
            name,
            connection,
            durable=durable,
            exclusive=exclusive,
            auto_delete=auto_delete,
            arguments=arguments,
        )

        def plan(model: VirtualHost) -> Plan:
            return model.plan_forget_queues([name]) if self._is_gone(name) else declare()

        declared = self._declared_again(name, declare)
        while declared is None:  # once; twice where the first had to forget one
            declared = await self._hosts.changes.make(Change(self._model, plan, partial(self._declared, name)))
        return declared

    def _declared(self, name: str, plan: Plan) -> HostedQueue | None:
        """Return the queue of a plan that was carried out; None: it was to forget one."""
        if plan.queue is None:
            self.queues.pop(name, None)
            return None
        if plan.is_new and plan.queue.settled.expires_ms is not None:
            self._expiring.add(plan.queue.name)
        hosted = self._hosted(plan.queue.name)
        hosted.used()
        return hosted

    @ending
    async def delete_queue(self, name: str, connection: int, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete a queue; return how many messages it had. One that is not there is deleted."""
        async with self._hosts.changes.alone():
            return await self._delete(name, connection, if_unused, if_empty)

    def _declared_again(self, name: str, declare: Callable[[], Plan]) -> HostedQueue | None:
        """Return a queue that is declared as it is, and goes only when somebody deletes it; None: declare it in turn.

        It need not wait while others declare what is new, at some milliseconds each.
        """
        model = self._model.queues.get(name)
        if model is None or model.auto_delete or model.owner is not None or model.settled.expires_ms is not None:
            return None
        with suppress(AmqpError):  # it may be right when it is its turn
            if not self._is_gone(name) and declare().is_nothing:
                hosted = self._hosted(name)
                hosted.used()
                return hosted
        return None

    def _is_gone(self, name: str) -> bool:
        """Tell whether a program has deleted a queue that AMQP declared."""
        model = self._model.queues.get(name)
        if model is None:
            return False
        return self._hosts.engine_has(self._model.engine_name(name), model.settled.is_stream) is None

    async def _delete(self, name: str, connection: int, if_unused: bool, if_empty: bool) -> int:
        hosted = self.find(name)
        consumers, messages = (0, 0) if hosted is None else (len(hosted.consumers), hosted.store.waiting)
        plan = self._model.plan_delete_queue(
            name, connection, if_unused=if_unused, if_empty=if_empty, consumers=consumers, messages=messages
        )
        if plan.queue is None:
            return 0
        if plan.queue.settled.dead_letter_exchange is not None:
            await self._hosts.dead_letters.caught_up()  # where they go is known while the queue is
        try:
            if plan.queue.settled.is_stream:
                await self.broker.delete_stream(self._model.engine_name(name))
            else:
                await self.broker.delete_queue(self._model.engine_name(name))
        except NotFound:
            messages = 0
        await self._hosts.commit(plan)
        self.queues.pop(name, None)
        self._expiring.discard(name)
        if hosted is not None:
            hosted.ended()
        return messages

    async def consumer_left(self, consumer: Consuming) -> None:
        """Have a consumer no more; a queue that was declared so is deleted after its last one."""
        hosted = consumer.hosted
        if hosted.remove(consumer) and hosted.model.auto_delete:
            await to_its_end(self._delete_if(hosted, lambda: not hosted.consumers))

    async def connection_ended(self, connection: int) -> None:
        """Delete what is exclusive to a connection."""
        for name in self._model.exclusive_queues(connection):
            try:
                await self.delete_queue(name, connection)
            except QflowError as error:
                _logger.warning("%s is not deleted with its connection: %s", self._model.where("queue", name), error)

    async def tick(self, now: float) -> None:
        """Delete queues unused for as long as their arguments say. Raises QflowError: one could not be."""
        failure: QflowError | None = None
        for name in list(self._expiring):
            hosted = self.find(name)
            if hosted is None:
                self._expiring.discard(name)
            elif hosted.is_unused(now):
                try:
                    await self._delete_if(hosted, partial(hosted.is_unused, now))
                except QflowError as error:
                    failure = error
        if failure is not None:
            raise failure

    async def _delete_if(self, hosted: HostedQueue, is_over: Callable[[], bool]) -> None:
        async with self._hosts.changes.alone():
            if is_over() and self.queues.get(hosted.name) is hosted:
                owner = hosted.model.owner
                await self._delete(hosted.name, -1 if owner is None else owner, False, False)
