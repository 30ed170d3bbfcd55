"""Names and paths as words of a shell: what is printed may be pasted."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from qflow.names import argument, command

NAMES = [
    "plain", "it's", "-n", "--help", "~", "*", "!!", "it's!\n", "#c", "a,b", "two  spaces", "  ", " x ", "\\", "a\\nb", "a\\\nb", "tab\t'q'",
    "a\x1b[31mred", "\x01f", "\x7f", "\x85", "caf\u00e9", "caf\u00e9'\n", "nbsp\u00a0x", "\u00fcber\u00a0z", "\u202eevil", "\u3000", "\u2028",
    "\U0001f600\u200b", "soft\u00ad", "$HOME`id`\"", "no utf-8 \udcff\udc80",
]  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_hands_over_the_name_that_was_meant(shell: str) -> None:
    """Byte for byte, whatever is in it; also where a page makes one space of two."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    words = " ".join(map(argument, NAMES))
    assert words.isprintable()
    assert "`" not in words
    assert "  " not in words
    done = subprocess.run([shell, "-c", f"printf '%s\\0' {words}"], stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode(errors="surrogateescape").split("\0")[:-1] == NAMES


def test_a_name_is_no_option() -> None:
    """Of a command that is printed, whatever it begins with."""
    assert command("purge", "/spool", "jobs") == "`qflow purge /spool jobs`"
    assert command("purge", "/spool", "--yes") == "`qflow purge -- /spool --yes`"
