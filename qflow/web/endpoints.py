"""What an endpoint of the API is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from qflow.web.arguments import Arguments
from qflow.web.rights import Rights
from qflow.web.site import Site

Answer = Callable[[Site, Rights, Arguments], Awaitable[Any]]


@attrs.frozen
class Field:
    """A parameter of a query, or a field of the JSON object in a body."""

    name: str
    what: str
    kind: str = "string"
    needed: bool = False


@attrs.frozen
class Endpoint:
    """What can be asked."""

    method: str
    path: str
    what: str
    answer: Answer
    fields: tuple[Field, ...] = ()

    @property
    def has_body(self) -> bool:
        return self.method == "POST"
