"""Transactions as a client gathers them: steps that are sent together when it commits. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qflow.deliveries import Deliveries
from qflow.delivery import ONE, Delivery
from qflow.errors import AlreadySettled, BrokerClosed, InDoubt, InvalidArgument, QflowError, TransactionTooLarge
from qflow.held_batch import AnyBatch
from qflow.message import OVERHEAD_BYTES, Headers, body_bytes, charge, decode_headers, encode_headers
from qflow.options import Key
from qflow.remote.client import requests
from qflow.remote.client.link import Reply, Request
from qflow.remote.wire.results import decode_results


class Draft:
    """See the module. Of one connection; its methods are called under the lock of that, if there is one."""

    def __init__(self, connection: Any, most_bytes: int, timeout_s: float | None) -> None:
        self._connection = connection
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self.state = "open"
        """Or `"committed"`, `"rolled back"` or `"interrupted"`."""
        self._steps: list[dict[str, Any]] = []
        self._bodies: list[bytes] = []
        self._keys: list[bytes] = []
        self._held: list[tuple[Any, int | None]] = []
        self._seen: set[tuple[int, int | None]] = set()
        """The same, batches by their identity."""
        self._charged = 0
        self._empty: list[int] = []
        """Where results of batches without messages are."""
        self._result: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._bodies)

    # What it holds ---------------------------------------------------------------------------------------------------

    def put(self, queue: Any, body: Any, options: Mapping[str, Any]) -> None:
        """Take a message."""
        step = {
            "do": "put",
            **requests.named("queue", queue, self._connection.uuid),
            "single": True,
            **requests.put_options(options),
        }
        self._add(step, [body_bytes(body)])

    def put_many(self, queue: Any, bodies: list[bytes], options: Mapping[str, Any]) -> None:
        """Take messages for one queue."""
        step = {"do": "put", **requests.named("queue", queue, self._connection.uuid)}
        step |= requests.put_options(options)
        if bodies:
            self._add(step, bodies)
        else:
            self.check_open()
            self._empty.append(sum(step["do"] != "ack" for step in self._steps) + len(self._empty))

    def publish(self, topic: str, body: Any, key: Key | None, headers: Headers | None) -> None:
        """Take what is published."""
        request = requests.publish(topic, body, key, headers)
        said = decode_headers(encode_headers(headers)) if headers else None
        step = {"do": "publish", "topic": topic, "headers": said, "key": key is not None}
        self._add(step, list(request.columns[0]), list(request.columns[1]) if key is not None else [])

    def _add(self, step: dict[str, Any], bodies: list[bytes], keys: list[bytes] | None = None) -> None:
        self.check_open()
        charged = self._charged + charge(bodies)
        if charged > self._most_bytes + OVERHEAD_BYTES:  # as large a message passes alone
            raise TransactionTooLarge(
                f"the transaction would hold {charged} bytes, {OVERHEAD_BYTES} of them for each message, more than "
                f"max_transaction_bytes={self._most_bytes}: commit more often"
            )
        self._charged = charged
        self._steps.append({**step, "bodies": len(bodies)})
        self._bodies += bodies
        self._keys += keys or []

    def ack(self, deliveries: Deliveries | Iterable[Delivery]) -> None:
        """Take deliveries to settle, all or none. Raises AlreadySettled. InvalidArgument: one is another broker's."""
        self.check_open()
        held: list[tuple[Any, int | None]] = []
        if isinstance(deliveries, Deliveries):
            if deliveries.total:
                held.append((deliveries.held, None))
        else:
            held += map(_place, deliveries)
        steps = []
        seen: set[tuple[int, int | None]] = set()
        for batch, index in held:
            key = id(batch), index
            if key in self._seen or key in seen:
                raise AlreadySettled(f"{batch!r} is acked in this transaction already")
            if getattr(batch.settler, "connection", None) is not self._connection:
                raise InvalidArgument(f"{batch!r} is of another broker: a transaction is of one")
            seen.add(key)
            steps.append({"do": "ack", "grant": batch.settler.grant.number, "places": _places(batch, index)})
        self._held += held
        self._seen |= seen
        self._steps += steps

    # Its end ---------------------------------------------------------------------------------------------------------

    def request(self) -> Request | None:
        """Return the request that commits it; None where it holds nothing. Its reply is the results.

        Raises:
            AlreadySettled: a delivery of it was settled elsewhere, or taken back.
        """
        self.check_open()
        for batch, index in self._held:
            _places(batch, index)
        for batch, _ in self._held:
            batch.settler.grant = batch.settler.grant.shared()
        self.state = "being committed"
        head = {"op": "transaction", "timeout_s": self._timeout_s, "steps": self._steps}
        columns = [self._bodies, self._keys] if self._keys else [self._bodies]
        return Request(head, columns, "the transaction", _results) if self._steps else None

    def committed(self, result: list[Any]) -> list[Any]:
        """It is committed."""
        for batch, index in self._held:
            if index is None:
                batch.end()
            elif not batch.is_settled(index):
                batch.settler.grant.take_part(batch, index)
        for place in self._empty:
            result.insert(place, range(0))
        self._result = result
        self.end("committed")
        return result

    def failed(self, error: BaseException) -> None:
        """It was refused, or nobody knows what became of it: then whoever settles what it held waits for the answer."""
        in_doubt = not isinstance(error, QflowError) or isinstance(error, InDoubt | BrokerClosed)
        for batch, _ in self._held if in_doubt else ():
            batch.settler.grant = batch.settler.grant.in_doubt()
        self.end("interrupted" if in_doubt else "rolled back")

    def rollback(self) -> None:
        """Give all of it up."""
        self.check_open()
        self.end("rolled back")

    def end(self, state: str) -> None:
        """It holds nothing any more."""
        self.state = state
        self._steps, self._bodies, self._keys, self._held = [], [], [], []
        self._seen.clear()

    @property
    def result(self) -> list[Any]:
        """What each put, put_many and publish returned. Raises InvalidArgument: it is not committed."""
        if self._result is None:
            raise InvalidArgument(f"the transaction has no result: it is {self.state}")
        return self._result

    def check_open(self) -> None:
        """Raises InvalidArgument: it has ended."""
        if self.state != "open":
            raise InvalidArgument(f"the transaction is {self.state}: begin another one")


def _place(delivery: object) -> tuple[Any, int | None]:
    """Return the batch that a delivery is of, and its place there."""
    if not isinstance(delivery, Delivery):
        raise InvalidArgument(f"{ONE}, not {type(delivery).__name__}")
    batch = delivery.settler
    if not isinstance(batch, AnyBatch):
        raise InvalidArgument(f"{delivery!r} is of another broker: a transaction is of one")
    return batch, batch.position(delivery.sequence)


def _places(batch: Any, index: int | None) -> requests.Places:
    """Return which places of a grant are to be settled. Raises AlreadySettled: they were, or went back."""
    if index is not None:
        batch.check_unsettled(index)
        return [[index, index + 1]]
    places: requests.Places = batch.settler.grant.left(batch)
    if places == []:
        raise AlreadySettled(f"{batch!r} was taken back by a seek, or its stream or subscription deleted")
    return places


def _results(reply: Reply) -> list[Any]:
    return [_result_of(told) for told in reply.result]


def _result_of(told: dict[str, Any]) -> Any:
    if "published" in told:
        return decode_results(told["published"])[0]
    return range(*told["range"]) if "range" in told else told["sequence"]
