"""Changing a users file: one program at a time, and whoever reads it meanwhile finds the old one or the new one, whole.

A change is: lock the directory, read, write `.NAME.XXXX` (0600), sync it, rename it, sync the directory. The rename is
the commit. What a crash leaves behind before that is a hidden file, which nothing reads.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qflow.errors import NotFound
from qflow.serving.users import Users

MODE = 0o600


def change(path: Path, changed: Callable[[Users], Users], *, create: bool = False) -> Users:
    """Replace what a users file says by what a function makes of it; return that.

    The new file has the owner of the old one, and mode 0600. A symbolic link is followed.

    Args:
        path: of the file.
        changed: returns the new users; what it raises leaves the file as it is.
        create: there may be no file yet.

    Raises:
        NotFound: there is no file, or no directory for it. InvalidArgument: the file is not as it should be. OSError:
            it cannot be written.
    """
    file = Path(os.path.realpath(path))
    with _locked(file.parent) as directory:
        try:
            users = Users.load(file)
        except NotFound:
            if not create:
                raise
            users = Users()
        users = changed(users)
        _write(file, users.text().encode(), directory)
    return users


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Hold the lock of a directory, and its descriptor."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:
        raise NotFound(f"there is no directory {str(directory)!r}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _write(file: Path, text: bytes, directory: int) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name[:200]}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            os.fchmod(opened.fileno(), MODE)
            _keep_owner(file, opened.fileno())
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.rename(name, file)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(file)
        raise
    os.fsync(directory)


def _keep_owner(file: Path, descriptor: int) -> None:
    """Have the new file belong to the owner of the old one: root may change what a service has to read."""
    with suppress(FileNotFoundError):
        old, new = file.stat(), os.fstat(descriptor)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            os.fchown(descriptor, old.st_uid, old.st_gid)
