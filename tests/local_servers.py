"""What tests of local servers share: the URL of a spool, its server's process, and its end."""

from __future__ import annotations

import fcntl
import tomllib
from pathlib import Path
from urllib.parse import quote

from qflow.storage.lock import owner_pid

ROOT = Path(__file__).parent.parent


def url(spool: Path, *, idle_s: float = 0.2) -> str:
    """Return the URL of a spool, whose server does not stay long."""
    return f"qflow://{quote(str(spool))}?idle_s={idle_s}"


def pid(spool: Path) -> int:
    """Return the process that owns a spool: the server."""
    owner = owner_pid(spool)
    assert owner, "there is none"
    return owner


def wait_for_the_end(spool: Path) -> None:
    """Return when there is no server any more: it holds a lock for as long as it lives."""
    with (spool / "amqp" / "serving").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def entry_points(directory: Path) -> Path:
    """Return a directory which, on the path, has the entry points of this tree: an older install may lack them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    made = directory / "entry-points" / "qflow_of_this_tree-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: qflow-of-this-tree\nVersion: 0\n")
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in declared.items()
    )
    (made / "entry_points.txt").write_text(text)
    return made.parent
