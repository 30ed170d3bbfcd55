"""A memory cgroup of our own, version 1 or 2: a limit the kernel enforces on a child, page cache included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs

from bench.errors import CannotRun

ROOT = Path("/sys/fs/cgroup")
_LIMITS = ("memory.limit_in_bytes", "memory.max")
_SWAP_LIMITS = ("memory.memsw.limit_in_bytes", "memory.swap.max")
_USAGES = ("memory.usage_in_bytes", "memory.current")


@attrs.frozen
class Group:
    """A cgroup; a process joins it by itself, before it imports anything large."""

    path: Path

    def join(self) -> None:
        """Move this process in."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def usage(self) -> int:
        """Return what it is charged, in bytes."""
        return int(self._file(_USAGES).read_text())

    def killed(self) -> bool:
        """Tell whether the kernel killed a process of it for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                words = (line.split() for line in (self.path / name).read_text().splitlines())
                return any(int(value) for key, value in words if key == "oom_kill")
        return False

    def _file(self, names: tuple[str, ...]) -> Path:
        return next(self.path / name for name in names if (self.path / name).exists())

    def limit(self, size: int) -> None:
        """Set the limit; swap, where it is counted, gives no way around it."""
        self._file(_LIMITS).write_text(str(size))
        with suppress(OSError, StopIteration):
            swap = self._file(_SWAP_LIMITS)
            swap.write_text("0" if swap.name == "memory.swap.max" else str(size))


@contextmanager
def limited(size: int, root: Path = ROOT) -> Iterator[Group]:
    """Make a cgroup with this limit; it is removed afterwards, when its processes are gone.

    Raises:
        CannotRun: no memory cgroup can be made here.
    """
    group = _make(root)
    try:
        group.limit(size)
        yield group
    except OSError as error:
        raise CannotRun(f"no memory cgroup can be used here: {error.strerror}") from error
    finally:
        with suppress(OSError):
            group.path.rmdir()


def limited_if_can(stack: ExitStack, size: int) -> tuple[Group | None, str]:
    """Return a cgroup with this limit, as long as the stack lasts, and a note; None where none can be made."""
    try:
        return stack.enter_context(limited(size)), f"in a cgroup of {size // 2**20} MiB, and it survived"
    except CannotRun as error:
        return None, f"{error}; RSS only"


def _make(root: Path) -> Group:
    """Try where version 1 has its memory hierarchy, then version 2, at the top and in this process's own group."""
    reasons = []
    for parent in (root / "memory", root, root / _own_group()):
        if not any((parent / name).exists() for name in ("memory.usage_in_bytes", "cgroup.controllers")):
            continue
        path = parent / f"qflow-bench-{os.getpid()}"
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            reasons.append(str(error.strerror))
            continue
        if any((path / name).exists() for name in _LIMITS):
            return Group(path)
        reasons.append("it has no memory controller")
        with suppress(OSError):
            path.rmdir()
    raise CannotRun(f"no memory cgroup can be made here: {'; '.join(dict.fromkeys(reasons)) or 'there are none'}")


def _own_group() -> str:
    """Return this process's group of version 2, relative to the root."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:].lstrip("/")
    return ""
