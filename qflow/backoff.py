"""How long a message whose callback failed waits for its next attempt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from qflow.callbacks import check_ran, is_failure, run
from qflow.config import parse_count, parse_span
from qflow.delivery import reason_of
from qflow.durations import Duration
from qflow.errors import AlreadySettled, InvalidArgument
from qflow.settings import Settings, setting


def _number(value: Any, what: str, *, least: int, most: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidArgument(f"{what} of a Backoff must be a number from {least} to {most}, got {value!r}")
    return value


class _Counted(Protocol):
    """What has failed."""

    @property
    def delivery_count(self) -> int: ...


class Backoff(Settings):
    """Attempts with growing waits: the `retry=` of `consume`.

    Args:
        first_s: how long a message waits after its first failure.
        factor: how many times longer after each that follows.
        most_s: the longest wait, before `jitter`.
        jitter: how much a wait differs by chance, as a share of it, 0 to 1, so that what failed together does not come
            back together.
        max_attempts: after so many it is a dead letter, or dropped where the queue has no `dead_letter`; None = the
            queue's `max_deliveries` decides.
    """

    of = " of a Backoff"
    first_s: float = setting(parse_span, default=1.0)
    factor: float = setting(partial(_number, least=1, most=1000), default=2.0)
    most_s: float = setting(parse_span, default=3600.0)
    jitter: float = setting(partial(_number, least=0, most=1), default=0.1)
    max_attempts: int | None = setting(parse_count, default=None)

    def __init__(
        self,
        first_s: Duration = 1.0,
        factor: float = 2.0,
        most_s: Duration = 3600.0,
        jitter: float = 0.1,
        max_attempts: int | None = None,
    ) -> None:
        """Raises InvalidArgument: one of them makes no sense."""
        super().__init__(first_s=first_s, factor=factor, most_s=most_s, jitter=jitter, max_attempts=max_attempts)

    def delay_s(self, failures: int) -> float:
        """Return how long a message waits that has failed so often."""
        try:
            wait_s = min(self.most_s, self.first_s * self.factor ** max(0, failures - 1))
        except OverflowError:
            wait_s = self.most_s
        from random import uniform  # a dear import, for few

        return wait_s * (1 + self.jitter * uniform(-1, 1))

    def terms(self, delivery: _Counted, error: BaseException) -> dict[str, Any]:
        """Return the arguments of the `nack` that a failed message is given back with."""
        failures, reason = delivery.delivery_count, reason_of(error)
        if self.max_attempts is not None and failures >= self.max_attempts:
            return {"requeue": False, "reason": reason}
        return {"delay_s": self.delay_s(failures), "reason": reason}


def retried(callback: Callable[[Any], object], retry: Backoff | None) -> Callable[[Any], object]:
    """Return a callback whose failed messages are given back with a wait, unless it settled them itself."""
    wait = check_retry(retry)
    if wait is None:
        return callback

    def call(delivery: Any) -> None:
        try:
            check_ran(callback(delivery))
        except BaseException as error:
            with suppress(AlreadySettled):  # the callback settled it itself
                delivery.nack(**wait.terms(delivery, error))
            raise

    return call


def retried_task(callback: Callable[[Any], object], retry: Backoff | None) -> Callable[[Any], Any]:
    """`retried`, for tasks."""
    wait = check_retry(retry)
    if wait is None:
        return callback

    import asyncio  # which who has no tasks does not need

    async def call(delivery: Any) -> None:
        task = asyncio.current_task()
        try:
            await run(callback, delivery)
        except BaseException as error:
            if is_failure(error, task):
                with suppress(AlreadySettled):  # the callback settled it itself
                    await delivery.nack(**wait.terms(delivery, error))
            raise

    return call


def check_retry(retry: object) -> Backoff | None:
    """Return it. Raises InvalidArgument: it is neither None nor a Backoff."""
    if retry is None or isinstance(retry, Backoff):
        return retry
    raise InvalidArgument(f"retry must be a qflow.Backoff, or None, not {type(retry).__name__}")
