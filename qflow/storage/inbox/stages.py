"""Batches of messages handed to a spool from outside, as directories of files: from a sink to the owner.

    inbox/staging/<query>-<batch>.<token>/   a *stage* being written: files of blocks, and at last the manifest
    inbox/<query>-<batch>/                   handed in: whole and on the disk, for the owner to adopt
    inbox/<query>-<batch>~/                  being adopted
    inbox/refused/<query>-<batch>/           set aside, with the reason in a file

A stage is handed in by one rename, taken by another: who takes it back (`withdraw`) and who adopts it cannot both. The
manifest (JSON with a CRC-32) names its files in order, what is in them, and whose they are: so one that is missing,
torn or exchanged is noticed, and what tasks that failed have left is not read. What is in a file: see `stage_files`.

Each function does one step that may be repeated after a crash; what they raise besides is plain OSError.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from contextlib import suppress
from itertools import chain
from time import time_ns
from typing import Any

from qflow.errors import CorruptionError, InvalidArgument
from qflow.named_tuples import NamedTuple
from qflow.storage.files import Files, make_directories, read_whole
from qflow.storage.inbox.batches import Target
from qflow.storage.inbox.stage_files import StageFile, check_no_link
from qflow.storage.log.sealing import seal, unseal

INBOX, STAGING, REFUSED = "inbox", "staging", "refused"
MANIFEST, REASON = "manifest", "reason"
MANIFEST_BYTES = 2**26
"""Of one with half a million files."""
_QUERY = r"[A-Za-z0-9_-]{1,120}"
_HANDED = rf"({_QUERY})-(\d{{1,19}})(~?)"
_STAGED = rf"({_QUERY})-(\d{{1,19}})\.([0-9a-f]{{32}})"
"""Compiled when a name is met, and kept by `re`; few spools have an inbox."""


class Batch(NamedTuple):
    """One batch of one query."""

    query: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.query}-{self.batch}"


class Manifest(NamedTuple):
    """What a stage is made of."""

    batch: Batch
    token: str
    """Of the stage: another attempt at the same batch has another one; see `new_token`."""
    uuid: str
    """Of the log it was made for."""
    once: bool
    """Its query hands in no other batch."""
    files: tuple[StageFile, ...]
    every: bool = False
    """Its query hands in every batch, also one without messages."""
    plan: str = ""
    """What its query says the batch is of, if that is known: the same when it is handed in again."""
    targets: tuple[Target, ...] = ()
    """Of an application: where the batch goes, each of which is to know it."""

    @property
    def messages(self) -> int:
        return sum(file.messages for file in self.files)


def check_batch(query: str, batch: int) -> Batch:
    """Return a batch whose name can be one of a directory.

    Raises:
        InvalidArgument: the query's is not 1 to 120 letters, digits, `-` and `_`, or the number not 0 to 2**63 - 1.
    """
    if not re.fullmatch(_QUERY, query) or not 0 <= batch < 2**63:
        raise InvalidArgument(
            f"a batch has a query of 1 to 120 letters, digits, '-' and '_' and a number from 0 on, not {query!r:.120} "
            f"and {batch}"
        )
    return Batch(query, batch)


def new_token() -> str:
    """Return the token of an attempt, which sorts behind those of earlier ones, as far as the clocks agree."""
    return f"{time_ns() // 10**6:012x}{os.urandom(10).hex()}"


def parse_name(name: str) -> tuple[Batch, bool] | None:
    """Return the batch that a name in the inbox stands for, and whether it is being adopted; None for no stage."""
    found = re.fullmatch(_HANDED, name)
    return None if found is None else (Batch(found[1], int(found[2])), bool(found[3]))


def inbox(spool: str) -> str:
    return os.path.join(spool, INBOX)


def handed_in(spool: str, batch: Batch) -> str:
    return os.path.join(spool, INBOX, batch.name)


def being_adopted(spool: str, batch: Batch) -> str:
    return os.path.join(spool, INBOX, batch.name + "~")


def set_aside(spool: str, batch: Batch) -> str:
    return os.path.join(spool, INBOX, REFUSED, batch.name)


def staged(spool: str, batch: Batch, token: str) -> str:
    return os.path.join(spool, INBOX, STAGING, f"{batch.name}.{token}")


# Handing in, by a sink ------------------------------------------------------------------------------------------------


def hand_in(files: Files, spool: str, manifest: Manifest) -> bool:
    """Hand a stage in whose files are finished; what else lies in its directory is removed.

    Returns:
        False: that batch was handed in before, by another attempt, and is not adopted yet. This one is removed.

    Raises:
        FileNotFoundError: it was handed in before, by this attempt; or a later one has begun, see `remove_earlier`.
    Cost: three syncs.
    """
    batch = manifest.batch
    source, target = staged(spool, batch, manifest.token), handed_in(spool, batch)
    wanted = {file.name for file in manifest.files}
    if not wanted:
        check_no_link(files, source)
        make_directories(files, source)
    for name in _check_whole(files, source, wanted) - wanted:
        files.unlink(os.path.join(source, name))
    remove_tree(files, set_aside(spool, batch))  # of an attempt before
    path = os.path.join(source, MANIFEST)
    files.write_replacing(path, seal(json.dumps(manifest._asdict()).encode()))
    files.sync_file(path)
    files.sync_directory(source)
    try:
        if files.exists(being_adopted(spool, batch)):
            raise FileExistsError
        _check_whole(files, source, wanted | {MANIFEST})  # a task may have made it anew, after a later attempt
        files.rename(source, target)
    except OSError as error:
        if not isinstance(error, FileExistsError) and error.errno != errno.ENOTEMPTY:
            raise
        remove_tree(files, source)
        return False
    files.sync_directory(inbox(spool))
    return True


def _check_whole(files: Files, directory: str, wanted: set[str]) -> set[str]:
    """Return what is in a stage. Raises FileNotFoundError: one of these files is not, as a later attempt removed it."""
    there = set(files.list(directory))
    for name in sorted(wanted - there):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.path.join(directory, name))
    return there


def withdraw(files: Files, spool: str, batch: Batch, token: str) -> bool:
    """Take back what was handed in and is not being adopted; False: somebody has it, or had it.

    Cost: a rename, and the removal of its files.
    """
    back = staged(spool, batch, token)
    try:
        files.rename(handed_in(spool, batch), back)
    except FileNotFoundError:
        return False
    files.sync_directory(inbox(spool))
    remove_tree(files, back)
    return True


def remove_staged(files: Files, spool: str, query: str, *, up_to: int) -> None:
    """Remove what attempts at batches of a query left that were not handed in, as far as that can be done."""
    for directory, batch in list_staged(files, spool):
        if batch.query == query and batch.batch <= up_to:
            with suppress(OSError):
                remove_tree(files, directory)


def remove_earlier(files: Files, spool: str, batch: Batch, token: str) -> None:
    """Remove what attempts before this one left of a batch, and were not handed in, as far as that can be done.

    One of them may still run. Its stage gets another name first: it is handed in as it was, or not at all. What such an
    attempt writes later stays for the next one; it removes nothing of this attempt, as its token is an earlier one.
    """
    for directory, one in list_staged(files, spool):
        if one == batch and directory.rpartition(".")[2] < token:
            left = staged(spool, one, "0" * 12 + os.urandom(10).hex())  # goes with a later attempt, if not now
            with suppress(OSError):
                files.rename(directory, left)
                remove_tree(files, left)


# Looking, by anybody -------------------------------------------------------------------------------------------------


def list_staged(files: Files, spool: str) -> list[tuple[str, Batch]]:
    """Return the directories of stages that are being written, or were left."""
    directory = os.path.join(spool, INBOX, STAGING)
    found = ((name, re.fullmatch(_STAGED, name)) for name in list_or_none(files, directory))
    return [(os.path.join(directory, name), Batch(match[1], int(match[2]))) for name, match in found if match]


def list_refused(files: Files, spool: str) -> list[Batch]:
    """Return the stages that were set aside."""
    found = map(parse_name, list_or_none(files, os.path.join(spool, INBOX, REFUSED)))
    return sorted(one[0] for one in found if one is not None)


def list_or_none(files: Files, directory: str) -> list[str]:
    """Return the names in a directory that need not be there."""
    try:
        return files.list(directory)
    except FileNotFoundError:
        return []


def why_refused(files: Files, spool: str, batch: Batch) -> str | None:
    """Return why a stage was set aside, None if it was not."""
    directory = set_aside(spool, batch)
    if not files.exists(directory):
        return None
    if not is_directory(files, directory):
        return "it is not a directory"
    try:
        return read_whole(files, os.path.join(directory, REASON)).decode()
    except FileNotFoundError:
        return "nobody could write down why"


# Reading, by the owner -----------------------------------------------------------------------------------------------


def is_directory(files: Files, path: str) -> bool:
    """Tell whether a directory is there, and not a link to one."""
    return stat.S_ISDIR(files.lstat(path).st_mode)


def read_manifest(files: Files, directory: str) -> Manifest:
    """Return what is in a stage.

    Raises:
        CorruptionError: it is no directory, or its manifest is missing, damaged, or one of another version.
    """
    if not is_directory(files, directory):
        raise CorruptionError(f"{directory} is not a directory: let nothing but sinks hand batches in")
    path = os.path.join(directory, MANIFEST)
    try:
        if (size := files.lstat(path).st_size) > MANIFEST_BYTES:
            raise CorruptionError(f"{path} has {size} bytes, and no manifest has more than {MANIFEST_BYTES}")
        data = unseal(read_whole(files, path), path)
    except FileNotFoundError as error:
        raise CorruptionError(f"{path} is missing: let no cleaner work inside a spool") from error
    try:
        return _decoded(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(
            f"{path} is not the manifest of a batch ({error!r:.200}): another version wrote it; have sinks and owner "
            "run the same version of qflow"
        ) from error


def _decoded(fields: dict[str, Any]) -> Manifest:
    """Return the manifest that JSON stands for. Raises ValueError, KeyError, TypeError, AttributeError: it is none."""
    made = Manifest(
        batch=Batch(*fields["batch"]),
        token=fields["token"],
        uuid=fields["uuid"],
        once=fields["once"],
        files=tuple(StageFile(*file) for file in fields["files"]),
        every=fields.get("every", False),
        plan=fields.get("plan", ""),
        targets=tuple(Target(*target) for target in fields.get("targets", ())),
    )
    names = [file.name for file in made.files]
    texts = [made.batch.query, made.token, made.uuid, made.plan, *names, *chain.from_iterable(made.targets)]
    numbers = [made.batch.batch, *chain.from_iterable(file[1:] for file in made.files)]
    for kind, values in ((str, texts), (int, numbers)):
        if any(type(value) is not kind for value in values):
            raise TypeError(f"what is to be {kind.__name__} is not")
    if any("/" in name or "\0" in name for name in names):
        raise ValueError("a file of it lies elsewhere")
    return made


def remove_tree(files: Files, directory: str) -> None:
    """Remove a directory of files, if it is there; who else removes it meanwhile does no harm."""
    try:
        names = list_or_none(files, directory)
    except NotADirectoryError:  # a link, which is not followed, or a file
        files.unlink(directory)
        return
    for name in names:
        with suppress(FileNotFoundError):
            files.unlink(os.path.join(directory, name))
    with suppress(FileNotFoundError):
        files.remove_directory(directory)
