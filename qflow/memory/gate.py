"""The gate of a queue: what it is charged, against what the ledger lent, and why a put may not pass at once.

    used ≤ borrowed + slack        charged bytes: waiting in memory, acquired, on the way in, being restored
    borrowed ≤ capacity            what the ledger lent; the broker's queues together never more than its capacity

What a schedule keeps of delayed messages it has spilled, 8 bytes each, is charged and cannot be spilled in its turn:
where that alone is more than the capacity, it is on slack.

*Slack* is the documented exception, so that nothing is ever stuck: one put at a time may pass when nothing can be
spilled, to be spilled as soon as it is visible, and a queue with no delivery in flight may hand out one message.

The hot path is one comparison with a number that is `NEVER` while there is a reason to look closer: `refresh` computes
those numbers after each change of what they depend on. All of it under the queue's lock.
"""

from __future__ import annotations

from qflow.memory.ledger import Account, Ledger
from qflow.memory.line import Line

NEVER = -1
ALWAYS = 2**62

ENDED = 1
"""Why a put may not pass, as bits: the queue was deleted, or its broker closed;"""
LIMITED = 2
"""it has a limit, so its depth is looked at;"""
LINE = 4
"""others wait in line at the limit;"""
LOGGED = 8
"""messages take their way through the log;"""
EXPIRES = 16
"""messages carry when they expire."""
FOR_PLAIN = LOGGED | EXPIRES
"""Reasons that hold back only what is put as a body and nothing else."""


class Gate:
    """See the module."""

    __slots__ = (
        "account", "arrived", "at_limit", "ceiling", "changed", "dropped", "get_slack", "getters", "give_back_below",
        "incoming", "largest", "ledger", "limited", "mark_acked", "mark_bytes", "passing", "place", "places",
        "put_slack", "quiet_bytes", "quiet_until", "restoring", "room", "shut", "starved", "used",
    )  # fmt: skip

    def __init__(self, account: Account, ledger: Ledger, changed: list[bool], place: int) -> None:
        self.account = account
        self.ledger = ledger
        self.changed, self.place = changed, place
        """Where whoever changes the queue tells that, to maintenance and who looks at figures; see `Changed`."""
        self.shut = 0
        """Why a put that finds memory may not pass at once."""
        self.largest = 0
        """What one message may be charged."""
        self.used = 0
        self.incoming = 0
        """Of it, for puts that are not visible yet."""
        self.restoring = 0
        """Of it, for messages that are being read."""
        self.dropped = 0
        """Of it, for messages that were purged and are not freed yet."""
        self.put_slack = 0
        self.get_slack = 0
        self.ceiling = NEVER
        """A plain put is admitted at once while `used` stays at or below."""
        self.passing = NEVER
        """The same for a put that takes its way through the log, or has a priority or headers."""
        self.limited = NEVER
        """The same for a plain put that takes one of the `places`."""
        self.places = 0
        """So many messages, or more, there is room for below the limit; 0 where somebody has to look."""
        self.give_back_below = NEVER
        """A settle that leaves less than this used looks for something to do."""
        self.quiet_until = 0
        """Such a settle does nothing for all that while fewer messages than this were ever acked."""
        self.quiet_bytes = ALWAYS
        """The same while messages have more bytes than this together."""
        self.at_limit = False
        """A put was not admitted at once, and the depth has not come down to the mark since."""
        self.mark_acked = 0
        """Before so many were ever acked, it can not be down at the mark."""
        self.mark_bytes = ALWAYS
        """Nor while messages have more bytes than this."""
        self.arrived = Line()
        """Getters wait here: for a message, for a restore that another thread does, for room to restore."""
        self.getters = 0
        self.starved = 0
        """Those of them that wait for room, not for a message."""
        self.room = Line()
        """Putters wait here for room in memory."""

    @property
    def slack(self) -> int:
        """What may be charged above what is borrowed."""
        return self.put_slack + self.get_slack

    @property
    def over(self) -> int:
        """What is charged above what is borrowed; below 0 where some of that is not used."""
        return self.used - self.account.borrowed

    @property
    def visible(self) -> int:
        """What is charged for messages that wait in memory or are acquired."""
        return self.used - self.incoming - self.restoring - self.dropped

    def bar(self, reason: int, bars: bool) -> None:
        """Have a reason why puts may not pass at once, or have it no more."""
        self.shut = self.shut | reason if bars else self.shut & ~reason

    def refresh(self) -> None:
        """Compute what the hot path compares with."""
        account = self.account
        borrowed = account.borrowed
        putters = self.room.watching
        self.ceiling = NEVER if self.shut or putters else borrowed
        self.passing = NEVER if self.shut & ~FOR_PLAIN or putters else borrowed
        self.limited = borrowed if self.shut == LIMITED and not putters else NEVER
        self.quiet_until, self.quiet_bytes = 0, ALWAYS
        looks = putters or self.put_slack or self.get_slack or self.starved or borrowed > account.capacity
        if looks or not account.may_have_spare:
            self.give_back_below = ALWAYS
        elif self.at_limit:
            self.give_back_below = ALWAYS
            self.quiet_until, self.quiet_bytes = self.mark_acked, self.mark_bytes
        else:
            self.give_back_below = borrowed - self.ledger.spared(account)
        self.note_change()

    def note_change(self) -> None:
        """Have maintenance look at the queue, and its figures be figured anew."""
        self.changed[self.place] = True

    def forget_places(self) -> None:
        """Have the places below the limit counted anew: something was reserved."""
        self.places = 0
        self.note_change()

    def borrow(self, missing: int) -> bool:
        """Borrow so much more, or nothing."""
        if not self.ledger.borrow(self.account, missing):
            return False
        self.refresh()
        return True

    def borrow_ahead(self, amount: int) -> None:
        """Borrow what another put like the last one would be charged, so that it passes at once; not if it is much."""
        if self.over + amount > 0 and amount <= self.ledger.spared(self.account):
            self.borrow(amount)

    def charge(self, amount: int) -> bool:
        """Charge bytes if there is room, borrowing where that helps."""
        missing = self.used + amount - self.account.borrowed
        if missing > 0 and not self.borrow(missing):
            return False
        self.note_change()
        self.used += amount  # no call from here on; see `Putting.step`
        return True

    def could_charge(self, amount: int) -> bool:
        """Tell whether there is room, or memory to borrow."""
        account = self.account
        return self.over + amount <= min(account.capacity - account.borrowed, self.ledger.free())

    def find(self, need: int, want: int) -> int:
        """Borrow for `want` bytes, or at least for `need`; return how many there is room for."""
        for amount in (want, need):
            missing = self.over + amount
            if missing > 0 and self.borrow(missing):
                break
        return -self.over

    def pass_alone(self, amount: int) -> None:
        """Charge bytes of a put, whatever room there is: what is above goes on slack.

        Others are left a share: their small puts would each have to spill something, for as long as this one takes.
        """
        self.ledger.borrow_most(self.account, self.over + amount, alone=True)
        self.note_change()
        self.put_slack = max(0, self.over + amount - self.get_slack)
        self.used += amount

    def trim(self) -> int:
        """Give up slack that is not needed any more; return what is above the bounds."""
        over = max(0, self.over)
        self.get_slack = min(self.get_slack, over)
        self.put_slack = min(self.put_slack, over - self.get_slack)
        return over

    def give_back_spare(self) -> None:
        """Return to the ledger what is borrowed beyond what the next batches may need; it is told of the rest."""
        account, used = self.account, self.used
        spared = self.ledger.spared(account)
        if account.borrowed - used > spared or account.borrowed > account.capacity:
            keep = max(used, min(used + spared // 2, account.capacity))
            if keep < account.borrowed:
                self.ledger.give_back(account, account.borrowed - keep)
        if account.borrowed > used and not account.may_have_spare:
            self.ledger.note_spare(account)

    def give_back_all(self) -> bool:
        """Return to the ledger all that is not used; False if that is nothing."""
        spare = max(0, self.account.borrowed - max(self.used, 0))
        self.ledger.give_back_all(self.account, spare)
        self.refresh()
        return spare > 0
