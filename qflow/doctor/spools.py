"""Judges the spool itself: its log, its disk, and who owns it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qflow.doctor.finding import Finding, Severity
from qflow.doctor.look import Look
from qflow.doctor.words import counted, ending, size, span
from qflow.errors import FormatTooNew, FormatTooOld
from qflow.names import argument
from qflow.troubles import LOG_TAKES, SPOOL_THERE

SLOW_S, STALLED_S = 0.5, 5.0
"""Syncs of a disk that does nothing else take milliseconds."""
SILENT_S = 30.0
"""An owner renews `stats.json` more often."""
SMALL_LOG_BYTES = 64 * 2**20
"""A log that is no longer is not worth a compaction."""
DEAD = 0.5
SCARCE, SCARCE_BYTES = 0.10, 10 * 2**30
"""The disk is nearly full where less than this share and less than so much is free."""
OUT, OUT_BYTES = 0.02, 2**30
SCARCE_INODES, OUT_INODES = 10_000, 100
"""Likewise for inodes, of which a file takes one."""
PINNING = 1000
"""A read of the log that began so many commits ago pins what has been freed since."""
_BLOCKED = "something else stands at `door` in it"
_LOAD = "`qflow snapshot load SNAPSHOT NEW`"


def judge_spool(look: Look) -> Iterator[Finding]:
    """Yield what is wrong with the spool itself."""
    first = _removed if _is_removed(look) else _failure
    after = (_obstacle, _failed, _problems, _last_commit, _disk, _slow_syncs, _dead_log, _readers, _owner, _maintenance)
    for judge in (first, *after):
        yield from judge(look)


def _failure(look: Look) -> Iterator[Finding]:
    path, error, kind = argument(look.path), look.failure, "damage"
    if isinstance(error, FormatTooNew):
        kind = "newer-format"
        sentence = f"a newer qflow wrote this spool than the one that looks: {error}"
        remedy = "upgrade this one: `git pull && pip install .` in its clone; nothing was changed"
    elif isinstance(error, FormatTooOld):
        kind = "older-format"
        sentence = f"a qflow from before the first release wrote this spool: {error}"
        remedy = "take what waits with the version that wrote it, and put it into a new spool; nothing was changed"
    elif not look.has_log:
        sentence = "the log is gone, and all durable messages with it; other files of the spool are still there"
        remedy = f"put the directory `log` back if it was moved; else bring back a snapshot: {_LOAD}, for nothing but "
        remedy += f"that can be done with {path}"
    elif not look.has_pages:
        sentence = f"the log cannot be opened, and nothing in it can be read: {error}"
        remedy = f"copy the directory before anything else; then bring back a snapshot: {_LOAD}, for nothing but that "
        remedy += f"can be done with {path}"
    elif error is not None:
        sentence = f"the log is damaged, and cannot be read as a whole: {error}"
        remedy = f"copy the directory before anything else; then `qflow check {path} --repair NEW` brings what can be "
        remedy += "read into a new spool, or bring back a snapshot"
    else:
        return
    yield Finding(severity=Severity.URGENT, kind=kind, sentence=sentence, remedy=remedy)


def _obstacle(look: Look) -> Iterator[Finding]:
    if look.obstacle is not None:
        yield Finding(
            severity=Severity.URGENT,
            kind="obstacle",
            sentence=f"nobody can open the spool: {look.obstacle}",
            remedy="see what stands there, and move it away, or give it the user and the rights it had, or mount it "
            "for writing; the log, with what waits, is beside it",
        )


def _troubles(look: Look) -> Mapping[str, str]:
    return (look.stats or {}).get("troubles") or {}


def _is_removed(look: Look) -> bool:
    """Tell whether its owner goes on without what lies at the path: it does not notice a log that was only moved."""
    is_without_log = not look.has_log and look.owner_pid is not None
    return not look.is_there or is_without_log or SPOOL_THERE in _troubles(look)


def _removed(look: Look) -> Iterator[Finding]:
    what = "the directory of the spool" if not look.is_there else "the log of the spool"
    yield Finding(
        severity=Severity.URGENT,
        kind="removed",
        sentence=f"{what} was removed, or replaced, under its owner: what waits is gone when the owner ends, and "
        "durable puts are refused, unless it was only moved",
        remedy="put it back if it was moved; else end who puts, and do not end the owner: let its consumers take what "
        "waits first, or have it copied by `broker.snapshot(NEW)` in the owner, or in who is connected to it; then "
        "start it again, and keep whatever removed the files from doing so",
    )


def _failed(look: Look) -> Iterator[Finding]:
    error = _troubles(look).get(LOG_TAKES)
    if error is not None:
        yield Finding(
            severity=Severity.URGENT,
            kind="log-failed",
            sentence=f"the owner confirms nothing more: {error}",
            remedy="mend what the text names (`dmesg`, `df`), then start the owner again: what was confirmed is there, "
            "and opening the spool tells of what is in doubt",
            facts={"error": error},
        )


def _problems(look: Look) -> Iterator[Finding]:
    if look.problems:
        more = f", and {len(look.problems) - 1:,} more" if len(look.problems) > 1 else ""
        path = argument(look.path)
        yield Finding(
            severity=Severity.URGENT,
            kind="damage",
            sentence=f"the log is damaged: {' '.join(look.problems[0].split())}{more}",
            remedy=f"`qflow check {path}` reads all of it and says what is lost; `qflow check {path} --repair NEW` "
            "brings the rest into a new spool",
            facts={"problems": list(look.problems[:100]), "count": len(look.problems)},
        )


def _last_commit(look: Look) -> Iterator[Finding]:
    if look.last_commit is not None:
        yield Finding(
            severity=Severity.PROBLEM,
            kind="last-commit-unusable",
            sentence=f"the copy of the last commit is not compared with the log: {look.last_commit}",
            remedy="give `log/last` the user and the rights that `log/data.mdb` has beside it (`chown --reference`, "
            "`chmod --reference`); or remove it: the next owner begins another one",
        )


def is_disk_scarce(look: Look) -> bool:
    """Tell whether the file system of a spool is nearly full."""
    return _are_bytes_scarce(look) or _are_inodes_scarce(look)


def _are_bytes_scarce(look: Look) -> bool:
    return bool(look.disk_bytes) and look.disk_free_bytes < min(SCARCE * look.disk_bytes, SCARCE_BYTES)


def _are_inodes_scarce(look: Look) -> bool:
    return bool(look.disk_inodes) and look.disk_free_inodes < min(SCARCE * look.disk_inodes, SCARCE_INODES)


def _inodes(look: Look) -> Iterator[Finding]:
    if not _are_inodes_scarce(look):
        return
    free, whole = look.disk_free_inodes, look.disk_inodes
    yield Finding(
        severity=Severity.URGENT if free < OUT_INODES else Severity.PROBLEM,
        kind="disk-full",
        sentence=f"the disk is nearly out of inodes: {free:,} of {whole:,} are free ({100 * free / whole:.0f} %), and "
        "each message that is spilled takes one; without one, puts wait as on a full disk, whatever room there is",
        remedy=f"`df -i {argument(look.path)}` shows them; remove files elsewhere, or start consumers; the next time, "
        "`qflow serve --spill segments`, or `qflow.open(spill='segments')`, keeps many messages in a file",
        facts={"free_inodes": free, "disk_inodes": whole},
    )


def _disk(look: Look) -> Iterator[Finding]:
    yield from _inodes(look)
    if not _are_bytes_scarce(look):
        return
    free, whole = look.disk_free_bytes, look.disk_bytes
    path = argument(look.path)
    compact = f"What is dead in the log goes back to the disk by `qflow compact {path}`"
    if look.log_used_bytes > free:
        compact += f", which needs {size(look.log_used_bytes)} for a copy before"
    yield Finding(
        severity=Severity.URGENT if free < min(OUT * whole, OUT_BYTES) else Severity.PROBLEM,
        kind="disk-full",
        sentence=f"the disk is nearly full: {size(free)} of {size(whole)} are free ({100 * free / whole:.0f} %)",
        remedy=f"`qflow du {path}` says what takes it here; free some elsewhere, or start consumers: what is acked "
        f"makes room for puts, in files that are kept for them. {compact}; all dead spill files, when the owner is "
        "started again. Puts are refused when it is full; acks go on",
        facts={"free_bytes": free, "disk_bytes": whole},
    )


def under_way_s(stats: Mapping[str, Any] | None) -> float:
    """Return for how long a sync has taken that has not ended, as far as an owner tells that; 0: there is none."""
    times = (stats or {}).get("sync_times")
    took_s = times.get("under_way_s", 0.0) if isinstance(times, Mapping) else 0.0
    return took_s if isinstance(took_s, int | float) else 0.0


def _slow_syncs(look: Look) -> Iterator[Finding]:
    longest_s = ((look.stats or {}).get("sync_times") or {}).get("longest_s", 0.0)
    standing_s = under_way_s(look.stats)
    if standing_s >= STALLED_S:
        severity = Severity.URGENT
        sentence = (
            f"the disk does not answer: a sync of the log has taken {span(standing_s)} and has not ended, and durable "
            "puts wait for that"
        )
        remedy = (
            "look whether the disk stands still (`iostat -x 1`, `dmesg`), or its file system is frozen (`fsfreeze -u` "
            "ends that): all goes on by itself when it answers, and ending the owner does not help it to"
        )
    elif max(longest_s, standing_s) >= SLOW_S:
        severity = Severity.PROBLEM if longest_s >= STALLED_S else Severity.NOTICE
        sentence = (
            f"the disk is slow: a sync of the log took {max(longest_s, standing_s):.1f} s within the last two "
            "minutes, and durable puts wait for that"
        )
        remedy = (
            "look what else writes to that disk (`iostat -x 1`), whether it is nearly full, and whether the spool lies "
            "on a network file system: a local disk of its own is what it wants"
        )
    else:
        return
    facts = {"longest_s": longest_s, "under_way_s": standing_s}
    yield Finding(severity=severity, kind="slow-syncs", sentence=sentence, remedy=remedy, facts=facts)


def _dead_log(look: Look) -> Iterator[Finding]:
    dead = look.log_bytes - look.log_used_bytes
    if look.log_bytes > SMALL_LOG_BYTES and dead > DEAD * look.log_bytes:
        path = argument(look.path)
        yield Finding(
            severity=Severity.NOTICE,
            kind="log-mostly-dead",
            sentence=f"{size(dead)} of the {size(look.log_bytes)} of the log are dead: kept for reuse, and not needed",
            remedy=f"`qflow compact {path}` gives them back; it needs {size(look.log_used_bytes)} beside the log "
            "meanwhile, and an owner goes on",
            facts={"dead_bytes": dead, "log_bytes": look.log_bytes},
        )


def _readers(look: Look) -> Iterator[Finding]:
    for pid, ago in look.readers:
        if ago >= PINNING:
            yield Finding(
                severity=Severity.PROBLEM,
                kind="pinned-pages",
                sentence=f"process {pid} has been reading one moment of the log for {counted(ago, 'commit')}, which "
                "pins all that was freed since: the log grows",
                remedy=f"see what it does (`ps -fp {pid}`; a snapshot or check of a large spool takes its time), or "
                f"end it: {ending(pid)}",
                facts={"pid": pid, "commits": ago},
            )


def _unowned(look: Look) -> Iterator[Finding]:
    if not (look.clean or look.failure or look.problems or look.obstacle):
        yield Finding(
            severity=Severity.NOTICE,
            kind="not-closed",
            sentence="nobody owns the spool, and the last owner did not close it: it was killed, or the machine "
            "went down",
            remedy="start the program again: nothing that was confirmed is lost, and what was held is delivered "
            f"again; `qflow check {argument(look.path)}` reads everything once if the machine itself had crashed",
        )
    if look.is_door_blocked:
        yield Finding(
            severity=Severity.NOTICE,
            kind="no-door",
            sentence=f"who opens the spool will let nobody in: {_BLOCKED}",
            remedy="see what it is, and move it away; the next owner makes a socket there",
        )


def _way_in(look: Look) -> str:
    """Return what opens the door of an owner that does not answer there."""
    if look.is_door_blocked:
        return f"{_BLOCKED}: move that away, and open the spool again"
    if not look.has_door:
        return (
            "its socket `door` is not there: the owner was told `door=False`, or something removed it; open the spool "
            "again, with `door=True`, which is the default"
        )
    return (
        "open the spool with `door=True`, which is the default, as the user who asks; a process that is stopped "
        "(`ps -o stat`: T or D) does not answer"
    )


def _owner(look: Look) -> Iterator[Finding]:
    if look.owner_pid is None:
        yield from _unowned(look)
        return
    process = f"process {look.owner_pid}" if look.owner_pid else "a process that is not known here"
    if not look.is_told:
        told = (
            "and there is nothing else"
            if look.stats is None
            else f"what it wrote {span(look.told_s_ago)} ago is judged"
        )
        if look.is_stopped:
            yield Finding(
                severity=Severity.URGENT,
                kind="silent-owner",
                sentence=f"the owner, {process}, is stopped (state T): nothing is stored, delivered or answered until "
                "it goes on",
                remedy=f"`kill -CONT {look.owner_pid}` has it go on; Ctrl-Z in its terminal, a signal or a debugger "
                "stopped it",
                facts={"pid": look.owner_pid, "told_s_ago": look.told_s_ago},
            )
            return
        yield Finding(
            severity=Severity.NOTICE,
            kind="no-door",
            sentence=f"the owner, {process}, lets nobody in or does not answer; {told}",
            remedy=_way_in(look),
            facts={"pid": look.owner_pid},
        )
        if look.stats is None or look.told_s_ago >= SILENT_S:
            ps = "`ps -o pid,stat,wchan,cmd` where it runs"
            if look.owner_pid:
                ps = f"`ps -o pid,stat,wchan,cmd -p {look.owner_pid}`"
            wrote = "has never written its figures"
            if look.stats is not None:
                wrote = f"wrote its figures last {span(look.told_s_ago)} ago"
            yield Finding(
                severity=Severity.PROBLEM if look.stats is None else Severity.URGENT,
                kind="silent-owner",
                sentence=f"the owner, {process}, {wrote}: it is stopped, or its disk is full",
                remedy=f"look at it: {ps}, its log, and the disk (`df`)",
                facts={"pid": look.owner_pid, "told_s_ago": look.told_s_ago},
            )


def _maintenance(look: Look) -> Iterator[Finding]:
    stats = look.stats or {}
    for what, text in _troubles(look).items():
        if what in (SPOOL_THERE, LOG_TAKES):
            continue
        yield Finding(
            severity=Severity.PROBLEM,
            kind="maintenance",
            sentence=f"maintenance of the owner fails at {what}: {text}; it is tried again each second",
            remedy="mend what the text names; the owner's log (logger `qflow`) has it with its time",
            facts={"what": what, "error": text},
        )
    problem = (stats.get("inbox") or {}).get("problem")
    if problem:
        yield Finding(
            severity=Severity.PROBLEM,
            kind="maintenance",
            sentence=f"a batch that was handed in from outside waits: {problem}",
            remedy="mend what the text names; it is adopted then by itself",
            facts={"what": "the inbox", "error": problem},
        )
    if look.refused_batches:
        yield Finding(
            severity=Severity.PROBLEM,
            kind="refused-batches",
            sentence=f"{counted(look.refused_batches, 'batch').replace('batchs', 'batches')} from outside "
            f"{'was' if look.refused_batches == 1 else 'were'} refused and set aside",
            remedy=f"`qflow check {argument(look.path)}` says why, and where they lie; mend the job, and have it write "
            "the batch again; then remove the directory that is named, if it is still there",
            facts={"batches": look.refused_batches},
        )
