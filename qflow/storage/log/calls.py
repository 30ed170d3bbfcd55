"""Calls from which several are told of one event, where an error of one must not keep it from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Calls:
    """Calls queues and parties, each whatever another one raised: one that fails keeps nobody else waiting."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """What was raised first."""

    def __call__(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self.error = self.error or error

    def raise_first(self) -> None:
        """Raise what was raised, if anything was."""
        if self.error is not None:
            raise self.error
