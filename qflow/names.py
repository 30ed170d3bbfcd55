"""How names and paths are said: shown, as words of a shell, and to who names a queue or the like that is not there."""

from __future__ import annotations

from collections.abc import Iterable

_LISTED = 20
_NEAREST = 3


def choices(name: str, known: Iterable[str], *, streams: Iterable[str] = (), queues: Iterable[str] = ()) -> str:
    """Return what there is instead of `name`, for the end of a sentence: the nearest names first, if some are near.

    Args:
        streams: names of another kind, of which it may be one; so are `queues`.
    """
    from difflib import get_close_matches

    names = sorted(known)
    for kind, others in (("stream", streams), ("queue", queues)):
        if name in others:
            return f"it is a {kind}"
    near = get_close_matches(name, names, _NEAREST)
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if len(names) > _LISTED:
        return f"{meant}there are {len(names):,}: `qflow ls` lists them"
    return f"{meant}there are: {', '.join(map(repr, names)) or 'none'}"


def printable(text: str, keep: str = "") -> str:
    """Return a text with escapes for what a terminal or a page would obey, but for the letters of `keep`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)


def argument(text: str) -> str:
    """Return a path or name as bash and zsh take it, with nothing in it that does something to a terminal.

    No shell hands over a NUL.
    """
    from shlex import quote

    if text.isprintable() and "  " not in text and "`" not in text:  # a page shows one space for two
        return quote(text)
    return "$'" + "".join(map(_escaped, text, f" {text}")) + "'"


def command(verb: str, *words: str) -> str:
    """Return a command of qflow in backticks. Words are paths and names; those that begin with `-` are no options."""
    ended = " --" if any(word.startswith("-") for word in words) else ""
    return f"`qflow {verb}{ended} {' '.join(map(argument, words))}`"


def _escaped(letter: str, before: str) -> str:
    if letter in "\\'":
        return f"\\{letter}"
    if letter.isprintable() and letter not in "`!" and letter + before != "  ":
        return letter
    return "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogateescape"))
