"""What the reports of processes that lived and died around a spool must hold, together with what is left in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from crash.door_client import GROUP, QUEUES, STREAM, lane_of, own, whole_lines
from crash.worker import token_of

Place = tuple[str, int]
"""A queue, or a partition of the stream, and a sequence, or an offset."""


class Got(NamedTuple):
    """A message that came to a client."""

    began: int
    """When the call began that it came by."""
    ended: int
    client: str
    place: Place
    token: str
    redelivered: bool


class History:
    """What all processes told."""

    def __init__(self, reports: Path) -> None:
        self.wrong: list[str] = []
        self.groups: list[tuple[str, list[str]]] = []
        self.put: dict[tuple[str, str], int] = {}
        self.got: list[Got] = []
        self.ack_tried: set[Place] = set()
        self.acked: dict[Place, int] = {}
        self.published: dict[int, str] = {}
        self.offsets: dict[str, Place] = {}
        self.lost = Counter[str]()
        lines = [(int(line[0]), path.name, *line[1:]) for path in reports.iterdir() for line in whole_lines(path)]
        for moment, client, word, *words in sorted(lines):
            getattr(self, f"_{word}")(moment, client, *words)
        self.got.sort()

    def _try(self, _: int, __: str, queue: str, *group: str) -> None:
        self.groups.append((queue, list(group)))

    def _put(self, _: int, __: str, queue: str, first: str, *group: str) -> None:
        for sequence, token in enumerate(group, int(first)):
            self.put[queue, token] = sequence

    def _got(self, ended: int, client: str, queue: str, *words: str) -> None:
        sequence, token, redelivered, _, began = words
        self.got.append(Got(int(began), ended, client, (queue, int(sequence)), token, redelivered == "1"))

    def _ack(self, _: int, __: str, queue: str, *numbers: str) -> None:
        self.ack_tried.update((queue, int(number)) for number in numbers)

    def _acked(self, moment: int, _: str, queue: str, *numbers: str) -> None:
        self.acked.update({(queue, int(number)): moment for number in numbers})

    def _number(self, _: int, __: str, number: str, token: str) -> None:
        self.published.setdefault(int(number), token)

    def _pub(self, _: int, __: str, number: str, token: str, *place: str) -> None:
        if self.published[int(number)] != token:
            self.wrong.append(f"number {number} is {token} and {self.published[int(number)]}")
        self.offsets[token] = (lane_of(int(place[0])), int(place[1])) if place else self.offsets.get(token, ("", -1))

    def _lost(self, _: int, __: str, kind: str, *___: str) -> None:
        self.lost[kind] += 1

    def _wrong(self, _: int, client: str, *words: str) -> None:
        self.wrong.append(f"{client}: {' '.join(words)}")

    # What must hold ----------------------------------------------------------------------------------------------

    def problems(self, left: dict[Place, str], stored: list[tuple[Place, str]]) -> list[str]:
        """Return what must not have been.

        Args:
            left: what each queue still had at the end, and the group was still to get.
            stored: what is in the stream.
        """
        found = [*self.wrong, *self._damaged(left), *self._missing(left), *self._again(left), *self._halves(left)]
        return found + self._out(left) + self._stream(stored)

    def _damaged(self, left: dict[Place, str]) -> list[str]:
        """Each message is what somebody put, and keeps its place."""
        known = {token for _, group in self.groups for token in group} | set(self.published.values())
        tokens: dict[Place, str] = {}
        found = []
        for place, token in [*((got.place, got.token) for got in self.got), *left.items()]:
            if tokens.setdefault(place, token) != token:
                found.append(f"{place} is {token} and {tokens[place]}")
            if token not in known:
                found.append(f"{place}: nobody put {token}")
        for (queue, token), sequence in self.put.items():
            if tokens.get((queue, sequence), token) != token:
                found.append(f"{queue} {sequence} is {tokens[queue, sequence]}, confirmed as {token}")
        return found

    def _missing(self, left: dict[Place, str]) -> list[str]:
        """What was confirmed, and nobody tried to ack, is there."""
        confirmed = {(queue, sequence): token for (queue, token), sequence in self.put.items()}
        confirmed |= {place: token for token, place in self.offsets.items() if place[0]}
        return [
            f"lost: {place} {token}"
            for place, token in confirmed.items()
            if place not in left and place not in self.ack_tried
        ]

    def _again(self, left: dict[Place, str]) -> list[str]:
        """What was acked does not come again, and what comes again says so."""
        found = [f"left after its ack was confirmed: {place}" for place in self.acked if place in left]
        seen: dict[Place, int] = {}
        for got in self.got:
            if got.began > self.acked.get(got.place, got.began):
                found.append(f"came after its ack was confirmed: {got}")
        for got in sorted(self.got, key=lambda got: got.ended):
            if not got.redelivered and seen.get(got.place, got.began) < got.began:
                found.append(f"came again as if new: {got}")
            seen.setdefault(got.place, got.ended)
        news = Counter(got.place for got in self.got if not got.redelivered)
        return found + [f"came {times} times as if new: {place}" for place, times in news.items() if times > 1]

    def _halves(self, left: dict[Place, str]) -> list[str]:
        """A batch is there as a whole, or not at all.

        A batch that was to be moved, and was not, may be moved in other batches, with others.
        """
        there: dict[str, set[str]] = defaultdict(set)
        for (queue, _), token in [*((got.place, got.token) for got in self.got), *left.items()]:
            there[queue].add(token)
        settled = {(queue, token) for (queue, token), place in self.put.items() if (queue, place) in self.ack_tried}
        moves = Counter(token for queue, group in self.groups if queue == "out" for token in group)
        found = []
        for queue, group in self.groups:
            here = [token in there[queue] or (queue, token) in settled for token in group]
            by_this = [
                is_here for is_here, token in zip(here, group, strict=True) if queue != "out" or moves[token] == 1
            ]
            if any(by_this) and not all(here):
                found.append(f"half of a batch came to {queue}: {group}")
        return found

    def _out(self, left: dict[Place, str]) -> list[str]:
        """What was moved by transactions is in one of both queues, once."""
        times = Counter(token for (queue, _), token in left.items() if queue in ("right", "out"))
        twice = [f"moved, and there {count} times: {token}" for token, count in times.items() if count > 1]
        gone = [f"moved to nowhere: {token}" for queue, token in self.put if queue == "right" and not times[token]]
        return twice + gone

    def _stream(self, stored: list[tuple[Place, str]]) -> list[str]:
        """Each number is in the stream once, where it was confirmed, and in order for each key."""
        times = Counter(token for _, token in stored)
        found = [f"stored {count} times: {token}" for token, count in times.items() if count > 1]
        found += [f"published and not stored: {token}" for token in self.offsets if not times[token]]
        for queue, group in self.groups:
            if queue == STREAM and 0 < sum(token in times for token in group) < len(group):
                found.append(f"half of a transaction is stored: {group}")
        places = {token: place for place, token in stored}
        found += [
            f"{token} is at {places[token]}, confirmed at {place}"
            for token, place in self.offsets.items()
            if place[0] and places.get(token, place) != place
        ]
        last: dict[str, int] = {}
        for _, token in sorted(stored):
            key, _, number = token.rpartition("-")
            if last.get(key, -1) >= int(number):
                found.append(f"out of order: {token}")
            last[key] = int(number)
        return found


def look(spool: Path) -> tuple[dict[Place, str], list[tuple[Place, str]]]:
    """Open what the last kill left; return what is in queues and before the group, and what is in the stream."""
    left: dict[Place, str] = {}
    with own(str(spool)) as broker:
        assert broker.check() == []
        assert broker.recovery.problems == ()
        for name in QUEUES:
            queue = broker.queue(name)
            while batch := queue.get_many(1000, timeout_s=0):
                left.update({(name, one.sequence): token_of(one.body) for one in batch})
                batch.ack()
        with broker.subscribe(STREAM, group=GROUP, start="earliest", follow=False) as subscription:
            while batch := subscription.get_many(1000, timeout_s=0):
                left.update({(lane_of(one.partition), one.offset): token_of(one.body) for one in batch})
                batch.ack()
        messages = broker.stream(STREAM).query()
        stored = [((lane_of(one.partition), one.offset), token_of(one.body)) for one in messages]
        assert broker.check() == []
    return left, stored
