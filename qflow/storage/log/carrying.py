"""Carrying over: what the journal holds and the log does not, when a log is opened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from qflow.errors import DiskFull
from qflow.named_tuples import NamedTuple
from qflow.storage.environment import BROKEN, STEP_BYTES, CannotGrow, Environment, LmdbError, MapFull, log_error
from qflow.storage.files import Files
from qflow.storage.log import journal, journal_reading
from qflow.storage.log.changes import play, volume
from qflow.storage.log.confirming import Confirming
from qflow.storage.log.journal import STATE_KEY, Journal, JournalState, encode_state, read_state
from qflow.storage.log.journal_reading import Found, missing_text
from qflow.storage.log.notes import is_note, open_notes, replay


class CarriedOver(NamedTuple):
    """What became of a journal."""

    confirming: Confirming
    records: int
    """How many were carried over into the log."""
    problems: list[str]


def carry_over(env: Environment, files: Files, uuid: str, *, clean: bool, journal_bytes: int) -> CarriedOver:
    """Have in the log what its journal holds. By the owner, before anything is read.

    Args:
        clean: the log was closed, and nothing was in the journal then.
        journal_bytes: the size of a new one; 0: there is to be none.

    Raises:
        CorruptionError: it is another log's journal, or of another format. It was left as it is.
        StorageError, DiskFull: it cannot be read, or the log cannot be written. Nothing was changed.
    Cost: reads the journal of a log that was not closed; a commit if there was something in it.
    """
    path = journal.path_of(env.path)
    with env.reading() as txn:
        state = read_state(txn, env.path)
    opened = journal_reading.open_to_write(path, files, uuid, state, clean=clean)
    create: Callable[..., Journal] | None = None
    if journal_bytes:
        create = partial(Journal.create, size=journal_bytes, uuid=uuid, files=files)
    with suppress(OSError):
        files.unlink(path + journal.STAGED)  # of a creation that a crash ended
    if opened is None:
        problems = [missing_text(path)] if state.in_use and not clean else []
        return CarriedOver(Confirming(env, create, None, state), 0, problems)
    found = opened.found
    keeps = bool(journal_bytes) and opened.head[::2] == (journal_bytes, journal.FORMAT) and not found.problems
    now = JournalState(found.last, opened.head.mark) if keeps else JournalState.without(found.last)
    kept: Journal | None = None
    try:
        if now != state:
            apply(env, found, now)
        if keeps:
            with journal.reading(path):
                kept = Journal(path, opened.fd, opened.head, uuid, files, found.last + 1)
        else:
            with suppress(OSError):
                files.unlink(path)  # another one is made, if there is to be one
    finally:
        if kept is None:
            files.close(opened.fd)
    return CarriedOver(Confirming(env, create, kept, now), len(found.records), found.problems)


def apply(env: Environment, found: Found, state: JournalState, *, step_bytes: int = STEP_BYTES) -> None:
    """Commit to a log what a journal holds, and what it says of that from then on.

    Args:
        step_bytes: see `Environment.make_room`.
    """
    volumes = list(map(volume, found.records))
    size, values = sum(size for size, _ in volumes), sum(values for _, values in volumes)
    while True:
        try:
            try:
                env.make_room(size, values, settles_only=True, step_bytes=step_bytes)
            except CannotGrow:
                env.confine(size, values, settles_only=True)
            unfit = _play(env, found, state)
        except MapFull as error:
            if env.confined:
                raise DiskFull(
                    f"the disk has no room for what the journal of {env.path} holds for it: give it some, and open the "
                    "spool again. Nothing was changed"
                ) from error
            env.grow_map()
        except BROKEN as error:
            raise log_error(error, env.path, "brought up to its journal") from error
        else:
            break
    if unfit:
        found.problems.append(
            f"{unfit} blocks that the journal of {env.path} adds to are not there, or are others: what they held is "
            "lost"
        )


def _play(env: Environment, found: Found, state: JournalState) -> int:
    txn = env.begin(write=True)
    try:
        notes = found.records[len(found.records) - open_notes(found.records) :]
        unfit = sum(play(txn, changes) for changes in found.records if not is_note(changes))
        unfit += replay(txn, notes, env.join)
        txn.put(STATE_KEY, encode_state(state))
        env.commit(txn)
    except BaseException:
        with suppress(LmdbError):  # raised where it has ended
            txn.abort()
        raise
    return unfit
