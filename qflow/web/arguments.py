"""What a request asks for, as checked values: fields of a form, of a JSON object, or of a query, alike."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from qflow.errors import InvalidArgument

_NOTHING = (None, "")


class Arguments:
    """Fields by name; an empty text stands for one that is not given, but for bodies.

    Raises:
        InvalidArgument: from each method, a field is not what it should be.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def text(self, name: str) -> str:
        """Return a text that must be there."""
        value = self.optional_text(name)
        if value is None:
            raise InvalidArgument(f"{name!r} is missing")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a text, or None."""
        value = self.fields.get(name)
        if value in _NOTHING:
            return None
        if not isinstance(value, str):
            raise InvalidArgument(f"{name!r} must be a text, not {value!r}")
        return value

    def number(self, name: str) -> int | None:
        """Return a number, or None."""
        value = self.fields.get(name)
        if value in _NOTHING:
            return None
        if isinstance(value, str) and value.isascii() and value.strip().isdecimal() and len(value) <= 18:
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument(f"{name!r} must be a number, not {value!r}")
        return value

    def flag(self, name: str) -> bool:
        """Tell whether something is ticked."""
        value = self.fields.get(name)
        said = value.lower() if isinstance(value, str) else value
        if said in (None, "", False, "off", "false", "no", "0"):
            return False
        if said in (True, "on", "true", "yes", "1"):
            return True
        raise InvalidArgument(f"{name!r} must be true or false, not {value!r}")

    def body(self) -> bytes:
        """Return the bytes of a message: `body` as text, or `body_base64`."""
        packed = self.optional_text("body_base64")
        if packed is not None:
            try:
                return base64.b64decode(packed, validate=True)
            except (binascii.Error, ValueError) as error:
                raise InvalidArgument(f"'body_base64' is no base64: {error}") from error
        value = self.fields.get("body", "")
        if not isinstance(value, str):
            raise InvalidArgument("'body' must be a text; bytes go as 'body_base64'")
        try:
            return value.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"'body' has half a character, {value[error.start]!a}: send 'body_base64'") from error

    def headers(self) -> dict[str, Any] | None:
        """Return the headers of a message: an object, or its text, or lines `name: value`."""
        value = self.fields.get("headers")
        if value in _NOTHING:
            return None
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"'headers' is no JSON: {error}") from error
        if isinstance(value, str):
            pairs = [line.partition(":") for line in value.splitlines() if line.strip()]
            if not all(colon for _, colon, _ in pairs):
                raise InvalidArgument("'headers' has lines such as `name: value`, or is a JSON object")
            value = {key.strip(): text.strip() for key, _, text in pairs}
        if not isinstance(value, dict):
            raise InvalidArgument("'headers' must be an object")
        return value
