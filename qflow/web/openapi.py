"""What an endpoint of the JSON API is, and what OpenAPI says of all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import attrs

from qflow import __version__
from qflow.errors import InvalidArgument
from qflow.web.arguments import Arguments
from qflow.web.rights import Rights
from qflow.web.site import Site

Answer = Callable[[Site, Rights, Arguments], Awaitable[Any]]
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "What is wrong, in a sentence."}},
}
_FAILURES = {
    "400": "Something is wrong with what was given.",
    "401": "Nobody has logged in.",
    "403": "The user may not do that.",
    "404": "There is no such queue, stream or subscription.",
    "409": "It is not as it was seen, or is configured otherwise; nothing was done.",
    "413": "The body is too large.",
    "503": "The broker is closed, or there is no room.",
}


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

    def check_known(self, names: Iterable[str]) -> None:
        """Raises InvalidArgument: one is no field of it; left out, it would be taken for done."""
        known = [field.name for field in self.fields]
        for name in names:
            if name not in known:
                takes = ", ".join(known) or "none"
                raise InvalidArgument(f"{name!r} is no field of {self.method} {self.path}, which takes {takes}")


def described(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "qflow",
            "version": __version__,
            "description": "What the page of `qflow serve SPOOL --http` shows and does, as JSON.",
        },
        "paths": paths,
        "security": [{}, {"password": []}, {"session": []}],
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "password": {"type": "http", "scheme": "basic"},
                "session": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "X-CSRF-Token",
                    "description": "With the cookie of a session; reading needs the cookie alone.",
                },
            },
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    name = "_".join([endpoint.method.lower(), *endpoint.path.split("/")[2:]])
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": endpoint.what,
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": {"type": "object"}}}},
            **{status: _failure(what) for status, what in _FAILURES.items()},
        },
    }
    if endpoint.has_body:
        schema = {
            "type": "object",
            "required": [field.name for field in endpoint.fields if field.needed],
            "properties": {field.name: _schema(field) | {"description": field.what} for field in endpoint.fields},
        }
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif endpoint.fields:
        operation["parameters"] = [
            {
                "name": field.name,
                "in": "query",
                "required": field.needed,
                "description": field.what,
                "schema": _schema(field),
            }
            for field in endpoint.fields
        ]
    return operation


def _schema(field: Field) -> dict[str, str]:
    return {} if field.kind == "any" else {"type": field.kind}


def _failure(what: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": what, "content": {"application/json": {"schema": schema}}}
