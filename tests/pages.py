"""The Python that pages of the docs show, run as a reader would: every block in order, in a directory of its own."""

from __future__ import annotations

import gc
import logging
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks_of(page: str) -> list[str]:
    """Return the blocks of Python in a page."""
    return blocks_in((ROOT / page).read_text())


def blocks_in(text: str) -> list[str]:
    """Return the blocks of Python in a text."""
    return re.findall(r"```python\n(.*?)```", text, re.S)


def needs_spark(block: str) -> bool:
    """Tell whether a block runs only where there is Spark."""
    return "spark" in block


def run(
    page: str, blocks: list[str], directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run them, see that they print what their comments say; `# name.py` begins a file that later blocks import."""
    assert blocks
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(directory)
    pasted = []
    for block in blocks:
        name = re.match(r"# (\w+)\.py\n", block)
        if name is None:
            pasted.append(block)
        else:
            (directory / f"{name[1]}.py").write_text(block)
            monkeypatch.delitem(sys.modules, name[1], raising=False)
    source = "\n".join(pasted)
    monkeypatch.setattr(logging.getLogger("qflow"), "handlers", list(logging.getLogger("qflow").handlers))
    capsys.readouterr()
    exec(compile(source, page, "exec"), {})
    gc.collect()  # what a page leaves open is reported here, not in a later test
    printed = capsys.readouterr().out
    for expected in re.findall(r"print\(.*\) +# (?!what|it )(.+)", source):
        assert expected.split(":")[0] in printed
