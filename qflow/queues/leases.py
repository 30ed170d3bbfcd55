"""Deliveries that are held for too long: ack timeouts, and slow consumers. Under the queue's lock."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from qflow.config import SlowConsumer
from qflow.delivery import Delivery
from qflow.errors import AlreadySettled
from qflow.events import EventKind
from qflow.held_batch import HeldBatch
from qflow.queues import portions
from qflow.queues.apart import HeldOne
from qflow.queues.claims import Claims
from qflow.queues.held import Held
from qflow.queues.lanes import LEASED, Lanes
from qflow.takers import Taker, named


class _Late:
    """Who answers for deliveries that were held for too long."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text

    def _refuse(self, *_: object) -> None:
        raise AlreadySettled(self._text)

    settle_one = return_one = extend_one = settle_batch = return_batch = extend_batch = _refuse


class Leases:
    """See the module."""

    def __init__(self, lanes: Lanes, held: Held, claims: Claims) -> None:
        self._context = lanes.context
        self._lanes = lanes
        self._held = held
        self.claims = claims
        self.coming: deque[HeldBatch] = deque()
        """What is left of long batches that were held for too long: it goes back a portion at a time."""
        self._slow_after_s: float | None = None
        self._slow_policy = SlowConsumer.NOTIFY
        held.timeout_s = lanes.context.settings.ack_timeout_s

    def watch(self, after_s: float | None, policy: SlowConsumer) -> None:
        """Look for what is held for longer than that; None stops that."""
        self._slow_after_s, self._slow_policy = after_s, policy
        self.refresh()

    def refresh(self) -> None:
        """After a change of what is watched for. What was taken while there was no ack timeout gets none."""
        context, held = self._context, self._held
        context.tick.now_s = now = context.monotonic()  # so that what is held from now on is not noted as held before
        before, held.timeout_s = held.timeout_s, context.settings.ack_timeout_s
        if before is None and held.timeout_s is not None:
            held.apart.timed_from = math.nextafter(now, math.inf)
        held.is_watched = held.timeout_s is not None or self._slow_after_s is not None
        held.quiet_until = 0.0
        self._lanes.close_front(LEASED, held.is_watched)
        self._lanes.refresh()

    def since(self) -> float:
        """Return the time to note for what is delivered now: to the second where nothing follows from it."""
        if not self._held.is_watched:
            return self._context.tick.now_s
        now, first = self._context.monotonic(), self._held.apart.timed_from
        return now if now > first else first

    def next_end_s(self) -> float:
        """Return in how many seconds the first ack timeout ends, or what is held is to be looked at again for that."""
        now, quiet_until = self._context.monotonic(), self._held.quiet_until
        return (quiet_until if now < quiet_until else self._held.first_end()) - now

    def release_late(self, may_work: bool = True) -> bool:
        """Take back some of what is held for longer than the ack timeout; it may let go of the lock.

        Cost: O(1) until the first ack timeout ends, then a step for each that has ended.

        Returns:
            False if that takes work on the disk, which may not be done: some of it may become dead letters.
        """
        held = self._held
        timeout = held.timeout_s
        buries = self._context.settings.dead_letter is not None
        if self.coming:
            if buries and not may_work:
                return False
            self._go_on()
        if timeout is None or (now := self._context.monotonic()) < held.quiet_until:
            return True
        late = held.late(now)
        if late and buries and not may_work:
            return False
        self._release(late, f"ack_timeout_s={timeout}")
        if held.timeout_s is not None and (first_end := held.first_end()) > now:
            held.quiet_until = min(first_end, now + held.timeout_s)  # of what is delivered from now on
        return True

    def are_late(self) -> bool:
        """Tell whether more is held for longer than the ack timeout, after some of it was taken back."""
        held = self._held
        if any(rest in held for rest in self.coming):
            return True
        return held.timeout_s is not None and held.quiet_until <= self._context.monotonic() and held.is_any()

    def _release(self, late: dict[HeldOne, float | None], why: str) -> None:
        """Take back what has been held for so long; it may let go of the lock."""
        name = self._context.name
        text = f"a message of queue {name!r} was held for longer than {why}: it went back to the queue"
        settler = _Late(name, text)
        for one in late:
            one.settler = settler
            if not isinstance(one, Delivery):
                one.late = text
            self.claims.return_if_refused(one)
        if late:
            self._tell_of(late, why)
            self.claims.returns.take_back([one for held in late for one in self._handed_out(held)])
            self._go_on()

    def _go_on(self) -> None:
        """Take back a portion of what is left of long batches."""
        while self.coming and self.coming[0] not in self._held:  # it was purged, or all of it went back
            self.coming.popleft()
        if self.coming:
            self.claims.returns.take_some_back(self.coming[0])

    def give_up_unseen(self) -> None:
        """Take back what nobody has seen, not counted as delivered, before all else is kept as delivered."""
        for batch in self._held.unseen():
            self.claims.returns.give_up(batch)
        for batch in [*self._held.batches, *self._held.apart.batches]:
            if self._in_hand(batch) is not None:
                self._handed_out(batch)

    def _handed_out(self, held: HeldOne) -> list[HeldOne]:
        """Return what a holder has seen, but for a long batch, which is `coming`.

        What was only fetched ahead goes back, not counted as delivered.
        """
        if isinstance(held, Delivery):
            return [held]
        in_hand = self._in_hand(held)
        if in_hand is None:
            if not portions.is_long(held):
                return [held]
            self.coming.append(portions.hand_over(self._held, held))
            return []
        found = [self.claims.leave_batch(held, place, stays=False) for place in held.unsettled()[:in_hand]]
        self.claims.returns.give_up(held)
        return [one for one in found if one is not None]

    def _in_hand(self, batch: HeldBatch) -> int | None:
        """Return how many messages its holder has seen of what is left of a batch, the first; None: it may be all.

        Acks may be on their way from another process, which has then seen more: those may be repeated, and are told to
        be, but where a count leads to a dead letter that nobody has tried.
        """
        in_hand = batch.taker.in_hand if isinstance(batch.taker, Taker) else None
        return None if in_hand and self._context.settings.max_deliveries is None else in_hand

    def _tell_of(self, late: dict[HeldOne, float | None], why: str) -> None:
        """Tell who held what for too long."""
        now_s = self._context.monotonic()
        by_taker: dict[Any, tuple[int, float]] = {}
        for one, since in late.items():
            count = 1 if isinstance(one, Delivery) else one.left_count
            known, first = by_taker.get(one.taker, (0, now_s))
            by_taker[one.taker] = known + count, first if since is None or since > first else since
        held: dict[tuple[str, int], tuple[int, float]] = {}
        for taker, (count, since_s) in by_taker.items():
            who = named(taker)
            known, first = held.get(who, (0, now_s))
            held[who] = known + count, min(first, since_s)
        for (name, pid), (count, since_s) in held.items():
            process = f" of process {pid}" if pid else ""
            text = f"{name!r}{process} held {count} message{'s' * (count != 1)} for {now_s - since_s:.1f} s: {why}"
            self._context.tell(EventKind.LEASE_EXPIRED, text)

    def release_slow(self) -> dict[HeldOne, float | None]:
        """Tell of messages that are held for too long, apply the policy; return what is held by those that are to stop.

        It may let go of the lock.
        """
        after_s = self._slow_after_s
        since_s = None if after_s is None else self._held.oldest_since()
        if after_s is None or since_s is None or (age := self._context.monotonic() - since_s) <= after_s:
            return {}
        depth = self._lanes.messages()
        text = f"a message is held for {age:.1f} s; {depth} messages are not settled"
        self._context.tell(EventKind.SLOW_CONSUMER, text)
        if self._slow_policy is SlowConsumer.NOTIFY:
            return {}
        late = self._held.longer_than(after_s, self._context.monotonic())
        self._release(late, f"on_slow_consumer allows, {after_s} s")
        return late if self._slow_policy is SlowConsumer.CLOSE else {}
