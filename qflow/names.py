"""What is said to whoever names a queue or the like that is not there."""

from __future__ import annotations

from collections.abc import Iterable

_LISTED = 20
_NEAREST = 3


def choices(name: str, known: Iterable[str]) -> str:
    """Return what there is instead of `name`, for the end of a sentence: the nearest names first, if some are near."""
    from difflib import get_close_matches

    names = sorted(known)
    near = get_close_matches(name, names, _NEAREST)
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if len(names) > _LISTED:
        return f"{meant}there are {len(names):,}: `qflow ls` lists them"
    return f"{meant}there are: {', '.join(map(repr, names)) or 'none'}"
