"""Judges queues and streams by what their owner says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from qflow.doctor.finding import Finding, Severity
from qflow.doctor.look import Letters, Look
from qflow.doctor.spools import is_disk_scarce
from qflow.doctor.words import counted, ending, quoted, size, span
from qflow.names import argument, command

HELD_S, HELD_LONG_S = 300.0, 1800.0
"""A message that is held for so long is a problem; for longer, urgent."""
HOLDERS_NAMED = 3
BLOCKED_S, BLOCKED_LONG_S = 1.0, 10.0
GROWS = 1.1
"""A queue grows where as much more is put than acked."""
SLOWEST = 0.05
"""Messages a second; what grows by less is shown as 0.0."""
COME_BACK, OFTEN = 0.2, 9
"""So many deliveries a second come back, and so many for each message that is acked."""
FULL = 0.95
BEHIND_MESSAGES, BEHIND_BYTES = 1000, 64 * 2**20
"""A subscription that nobody has open may be less than that behind."""
Stats = Mapping[str, Any]


def judge_queues(look: Look) -> Iterator[Finding]:
    """Yield what is wrong with queues."""
    for finding in _of_queues(look):
        yield _typed(finding)


def _typed(finding: Finding) -> Finding:
    """Return a finding with a remedy that somebody can type: a shell ends a name at a NUL, and goes on with another."""
    name = finding.queue or ""
    if "\0" not in name or argument(name) not in finding.remedy:
        return finding
    written = repr(name).replace("`", "\\x60")  # what stands between backticks has none
    remedy = f"no command takes this name, for a shell ends it at its NUL: do what the runbook says at {finding.kind} "
    remedy += f"on the page, in `qflow top`, or from Python with `broker.queue({written})`"
    return attrs.evolve(finding, remedy=remedy)


def _of_queues(look: Look) -> Iterator[Finding]:
    stats = look.stats or {}
    for name, queue in stats.get("queues", {}).items():
        yield from _held(look, name, queue)
        blocked = list(_blocked(look, name, queue))
        yield from blocked
        yield from _lost(look, name, queue)
        returning = list(_coming_back(look, name, queue))
        yield from returning
        is_for_letters = name in look.letters and not _is_taken(queue)
        if not is_for_letters and not blocked and not returning:  # who is blocked says that it grows, too
            yield from _growing(look, name, queue)
    for name, letters in look.letters.items():
        queue = stats.get("queues", {}).get(name, {})
        if _is_taken(queue) or not (letters.is_named or queue):
            continue
        now = attrs.evolve(letters, messages=queue.get("messages", letters.messages))
        yield from _letters(look, name, now, is_durable=queue.get("durable", True))
    yield from _memory(look, stats)


def _is_taken(queue: Stats) -> bool:
    """Tell whether somebody takes messages just now: letters that are handled, or what came by way of another queue."""
    return bool(queue.get("consumers_total") or queue.get("acquired_messages"))


def _leaves(look: Look, name: str, queue: Stats) -> bool:
    """Tell whether what waits leaves by itself, into another queue as it expires, and nobody has ever taken any."""
    has_left = queue.get("expired_total", 0) and queue.get("dead_lettered_total", 0)
    return not queue["delivered_total"] and bool(name in look.passing or has_left)


def _held(look: Look, name: str, queue: Stats) -> Iterator[Finding]:
    holders = [one for one in queue.get("holders", ()) if one["oldest_s"] >= HELD_S]
    if not holders and queue.get("oldest_unacked_s", 0.0) >= HELD_S:
        holders = [{"consumer": "", "pid": None, "messages": 0, "oldest_s": queue["oldest_unacked_s"]}]
    for holder in sorted(holders, key=lambda one: -one["oldest_s"])[:HOLDERS_NAMED]:
        yield _held_by(look, name, holder)


def _held_by(look: Look, name: str, holder: Stats) -> Finding:
    pid, messages = holder["pid"], holder["messages"]
    what = "a message" if messages <= 1 else f"{messages:,} messages, the first of them"
    who = f"consumer {quoted(holder['consumer'])}" if holder["consumer"] else "somebody"
    who += f" of process {pid}" if pid else ""
    inside = pid is not None and pid == look.owner_pid
    if not pid:
        end = "close its connection"
    elif inside:
        end = f"see what that thread or task does (`py-spy dump --pid {pid}`), and have it ack or nack"
    elif look.owner_pid == 0:
        end = "see what it does where the owner runs, whose number that is, or end it; what it holds comes back at once"
    else:
        end = f"see what it does (`py-spy dump --pid {pid}`), or end it: {ending(pid)}; what it holds comes back "
        end += "at once"
    timeout = command("alter", look.path, name, "ack_timeout_s=600")
    return Finding(
        severity=Severity.URGENT if holder["oldest_s"] >= HELD_LONG_S else Severity.PROBLEM,
        kind="held-too-long",
        sentence=f"{who} has held {what} of queue {quoted(name)} for {span(holder['oldest_s'])}",
        remedy=f"{end}; {timeout} has it given back by itself the next time",
        queue=name,
        facts=dict(holder),
    )


def _blocked(look: Look, name: str, queue: Stats) -> Iterator[Finding]:
    putters, longest = queue.get("blocked_putters", 0), queue.get("blocked_longest_s", 0.0)
    if not putters or longest < BLOCKED_S:
        return
    on = queue.get("blocked_on") or "its limit"
    limit = None if on == "capacity" else queue.get(on)
    at = f"{on} of queue {quoted(name)}"
    if on == "capacity":
        at = f"the capacity of memory, for queue {quoted(name)}"
    elif limit is not None:
        at += f" ({limit:,})" if on == "limit_messages" else f" ({size(limit)})"
    takers = queue.get("consumers_total", 0)
    taking = f"{counted(takers, 'consumer')} take{'s' if takers == 1 else ''}" if takers else "nobody takes"
    if not takers and (queue["acquired_messages"] or (queue.get("rates") or {}).get("delivered_60s")):
        taking = "somebody takes now and then"  # by gets: none waits just now
    raised = ""
    if limit is not None and on != "capacity":
        raised = f", or let in more: {command('alter', look.path, name, f'{on}={2 * limit}')}"
    yield Finding(
        severity=Severity.URGENT if longest >= BLOCKED_LONG_S else Severity.PROBLEM,
        kind="blocked-producers",
        sentence=f"{counted(putters, 'producer')} blocked for up to {span(longest)} at {at}; {taking} from it",
        remedy=f"start consumers, or take what is in the way: {command('get', look.path, name)}{raised}",
        queue=name,
        facts={"putters": putters, "longest_s": longest, "on": on, "limit": limit, "consumers": takers},
    )


def _growing(look: Look, name: str, queue: Stats) -> Iterator[Finding]:
    if queue.get("paused"):
        yield Finding(
            severity=Severity.PROBLEM if queue["messages"] else Severity.NOTICE,
            kind="paused",
            sentence=f"queue {quoted(name)} is paused; {_waiting(queue['messages'])}",
            remedy="`p` in `qflow top`, *Resume deliveries* on the page, or `resume()` of the queue has it go on",
            queue=name,
            facts={"messages": queue["messages"]},
        )
        return
    rates = queue.get("rates") or {}
    incoming, outgoing = rates.get("put_60s", 0.0), rates.get("acked_60s", 0.0)
    taken = rates.get("delivered_60s", 0.0) if rates else float(queue["delivered_total"])
    waiting, takers = queue["lag_messages"], queue.get("consumers_total", 0)
    grows = incoming > outgoing * GROWS if rates else queue["put_total"] > 0
    facts = {"waiting": waiting, "put_60s": incoming, "acked_60s": outgoing, "consumers": takers}
    if not waiting or not (grows or queue.get("at_limit")):
        return
    still = not rates or rates.get("put_10s", incoming) > rates.get("acked_10s", outgoing) * GROWS
    is_slow = bool(rates) and (incoming < SLOWEST or not still)
    if not takers and not taken and not queue["acquired_messages"]:
        if _leaves(look, name, queue):
            return
        shown = f"{command('peek', look.path, name)} shows what waits; " if queue.get("durable", True) else ""
        yield Finding(
            severity=Severity.PROBLEM,
            kind="no-consumer",
            sentence=_unconsumed(name, queue, is_coming=not is_slow),
            remedy=f"start its consumers; {shown}if it is not needed, {command('purge', look.path, name)} and end who "
            "puts",
            queue=name,
            facts=facts,
        )
    elif grows and rates and still and waiting > 60 * max(_lately(rates, "acked"), 1.0):
        who = f"{counted(takers, 'consumer')} of" if takers else "those who take from"
        come, go = (f"{_lately(rates, flow):,.1f}" for flow in ("put", "acked"))
        yield Finding(
            severity=Severity.NOTICE,
            kind="slow-consumers",
            sentence=f"{who} queue {quoted(name)} fall{'s' if takers == 1 else ''} behind: {come} messages a second "
            f"come, {go} are acked, {waiting:,} wait",
            remedy=f"start more consumers ({command('work --processes 8', look.path, name, 'module:function')}), or "
            "take many at once with `get_many`",
            queue=name,
            facts=facts,
        )


def _unconsumed(name: str, queue: Stats, *, is_coming: bool) -> str:
    """Say that nobody consumes a queue; that it grows where messages come, and it neither drops nor expires any."""
    rates = queue.get("rates") or {}
    who, waits = f"nobody consumes queue {quoted(name)}", _waiting(queue["lag_messages"])
    if queue.get("at_limit"):
        limits = [f"limit_messages ({queue['limit_messages']:,})"] if queue["limit_messages"] is not None else []
        limits += [f"limit_bytes ({size(queue['limit_bytes'])})"] if queue["limit_bytes"] is not None else []
        return f"{who}, and it is at {' or '.join(limits)}: {waits}, and its on_overflow decides about each further put"
    left = [f"{queue['expired_total']:,} expired"] if queue["expired_total"] else []
    left += [f"{queue['dropped_total']:,} were dropped"] if queue["dropped_total"] else []
    come = f"{_lately(rates, 'put'):,.1f} {'come' if left else 'more'} each second"
    waits += f", {come}" if rates and is_coming else ""
    if left:
        return f"{who}: {waits}; since its owner was started {' and '.join(left)}"
    return f"{who}{', and it grows' if is_coming else ''}: {waits}"


def _lately(rates: Stats, flow: str) -> float:
    """Return how many a second: of a minute, or of ten seconds, as where its owner was started within that minute."""
    return max(float(rates.get(f"{flow}_{seconds}s", 0.0)) for seconds in (10, 60))


def _coming_back(look: Look, name: str, queue: Stats) -> Iterator[Finding]:
    rates = queue.get("rates") or {}
    back, done = rates.get("redelivered_60s", 0.0), rates.get("acked_60s", 0.0)
    is_lasting = rates.get("redelivered_10s", 0.0) > 0 and queue["messages"]
    become_letters = 2 * queue["dead_lettered_total"] > queue["redelivered_total"]
    if back < COME_BACK or back < OFTEN * done or not is_lasting or become_letters:
        return
    apart = command("alter", look.path, name, "max_deliveries=5", f"dead_letter={name}.dead")
    yield Finding(
        severity=Severity.PROBLEM,
        kind="coming-back",
        sentence=f"what queue {quoted(name)} delivers comes back: {back:,.1f} deliveries a second, and {done:,.1f} "
        f"messages are acked; it has {counted(queue['messages'], 'message')}",
        remedy=f"see in the logs of its consumers why they give messages back, or end with them; {apart} has what is "
        "delivered five times set aside",
        queue=name,
        facts={"redelivered_60s": back, "acked_60s": done, "redelivered_total": queue["redelivered_total"]},
    )


def _waiting(number: int) -> str:
    return f"{counted(number, 'message')} {'waits' if number == 1 else 'wait'}"


def _lost(look: Look, name: str, queue: Stats) -> Iterator[Finding]:
    in_no_log = queue.get("lost_total", 0)
    lost = in_no_log + queue.get("quarantined_total", 0)
    if lost:
        path = argument(look.path)
        remedy = "`dmesg` and `smartctl` say whether the disk fails"
        if in_no_log:
            remedy += f"; {'the' if in_no_log == lost else f'{in_no_log:,} of them were spilled, and in no log: the'} "
            remedy += "owner's log (logger `qflow`) says which, and nothing brings those back"
        if in_no_log < lost:
            remedy += (
                f"; `qflow check {path}` names damaged blocks, and `qflow check {path} --repair NEW` brings what is "
            )
            remedy += "whole into a new spool"
        yield Finding(
            severity=Severity.URGENT,
            kind="lost-messages",
            sentence=f"{counted(lost, 'message')} of queue {quoted(name)} could not be read back and are lost",
            remedy=f"{remedy}. This is told until the owner is started again",
            queue=name,
            facts={"lost": lost, "ranges": [list(pair) for pair in queue.get("lost_ranges", ())][:10]},
        )


def _letters(look: Look, name: str, letters: Letters, *, is_durable: bool) -> Iterator[Finding]:
    if not letters.messages:
        return
    why = ""
    if letters.reasons:
        reason, count = letters.reasons[0]
        of = f" of the first {letters.looked_at:,}" if letters.looked_at < letters.messages else ""
        why = f"; {count:,}{of} for the commonest reason: {quoted(reason)}"
    shown = f" ({command('peek', look.path, name)} shows headers and bodies)" if is_durable else ""
    some = "; --where takes those of one reason" if is_durable else ""
    yield Finding(
        severity=Severity.PROBLEM,
        kind="dead-letters",
        sentence=f"{counted(letters.messages, 'dead letter')} in queue {quoted(name)}{why}",
        remedy=f"mend the cause{shown}, then {command('redrive', look.path, name)}, or "
        f"{command('purge', look.path, name)} if they are of no use{some}",
        queue=name,
        facts={"messages": letters.messages, "reasons": dict(letters.reasons), "looked_at": letters.looked_at},
    )


def _memory(look: Look, stats: Stats) -> Iterator[Finding]:
    capacity, resident = stats.get("capacity_bytes", 0), stats.get("resident_bytes", 0)
    spilled = stats.get("spilled_bytes", 0)
    if capacity and resident >= FULL * capacity:
        queues = stats["queues"]
        names = sorted(queues, key=lambda name: -queues[name]["resident_bytes"])
        most = f"; most of it has queue {quoted(names[0])}" if names else ""
        blocked = any(one.get("blocked_putters") and one.get("blocked_on") == "capacity" for one in queues.values())
        remedy = "nothing is lost and puts go on, at the speed of the disk; start consumers, raise `capacity_bytes`, "
        if blocked or is_disk_scarce(look):
            remedy = "what was confirmed is kept, and puts wait for room in memory or on the disk: free some there, "
            remedy += "start consumers, raise `capacity_bytes`, "
        yield Finding(
            severity=Severity.NOTICE,
            kind="memory-full",
            sentence=f"memory for messages is full: {size(resident)} of {size(capacity)}{most}; {size(spilled)} are "
            "spilled to disk",
            remedy=f"{remedy}or give that queue a `capacity_bytes` of its own",
            queue=names[0] if names else None,
            facts={"resident_bytes": resident, "capacity_bytes": capacity, "spilled_bytes": spilled},
        )


def judge_streams(look: Look) -> Iterator[Finding]:
    """Yield what is wrong with streams."""
    for name, stream in (look.stats or {}).get("streams", {}).items():
        for subscription in stream["subscriptions"]:
            behind = subscription["lag_messages"]
            size_bytes = int(stream["bytes"] * min(1.0, behind / max(1, stream["messages"])))
            is_behind = behind >= BEHIND_MESSAGES or size_bytes >= BEHIND_BYTES
            if subscription["name"] is None or subscription["members"] or not is_behind:
                continue
            to_the_end = command("streams reset --to latest", look.path, name, subscription["name"])
            its_end = command("streams unsubscribe", look.path, name, subscription["name"])
            yield Finding(
                severity=Severity.NOTICE,
                kind="stream-behind",
                sentence=f"subscription {quoted(subscription['name'])} of stream {quoted(name)} is "
                f"{counted(behind, 'message')} behind, about {size(size_bytes)}, and nobody has it open",
                remedy=f"start who reads with it, have it go on at the end ({to_the_end}), or delete it "
                f"({its_end}): a stream that retains until all have consumed keeps what it has not read",
                queue=name,
                facts={"subscription": subscription["name"], "lag_messages": behind, "lag_bytes": size_bytes},
            )
        if stream.get("damaged_total", 0):
            yield Finding(
                severity=Severity.URGENT,
                kind="lost-messages",
                sentence=f"{counted(stream['damaged_total'], 'message')} of stream {quoted(name)} could not be read: "
                "their blocks are damaged",
                remedy=f"`qflow check {argument(look.path)}` says which; `dmesg` says whether the disk fails",
                queue=name,
                facts={"lost": stream["damaged_total"]},
            )
