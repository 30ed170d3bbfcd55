"""Errors by name: what one side raises, the other raises, too."""

from __future__ import annotations

import json
from typing import Any

from qflow import errors
from qflow.errors import QflowError

KINDS: dict[str, type[QflowError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, QflowError)
}


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return the head that tells of an error: its class or the nearest above, its text, and its attributes as facts."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS), "QflowError")
    text = str(error)
    if name == "QflowError" and type(error) is not QflowError:
        text = f"the owner failed at this: {type(error).__name__}: {text}"
    return {
        "error": name,
        "text": text,
        "facts": {key: value for key, value in vars(error).items() if _is_plain(value)},
    }


def decode_error(head: dict[str, Any]) -> QflowError:
    """Return the error that a head tells of; one of a class that is not known here is a `QflowError`."""
    name, text, facts = head.get("error"), head.get("text"), head.get("facts")
    kind = KINDS.get(name, QflowError) if isinstance(name, str) else QflowError
    said = text if kind is not QflowError or name == "QflowError" else f"{name}: {text}"
    named = facts if isinstance(facts, dict) else {}
    try:
        return kind(str(said), **named)
    except TypeError:  # it takes none, or others
        error = QflowError(str(said)) if kind is errors.GapError else kind(str(said))
        vars(error).update(named)
        return error


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
