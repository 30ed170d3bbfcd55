"""Transactions that many looks at a log share: to begin one takes longer than a look, more so beside a busy owner."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from qflow.storage.environment import Environment

SHARED_S = 0.05
"""A transaction that is older is not given to another look: it pins what is freed meanwhile."""


class Readable(Protocol):
    """An environment, or `Moments` of one."""

    def reading(self) -> AbstractContextManager[Any]:
        """Give a transaction that reads one moment."""


class Moments:
    """See the module. A context, in which one look after the other is made, by one thread."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._open: ExitStack | None = None
        self._txn: Any = None
        self._since_s = 0.0

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Give a transaction for a look, as that of the environment, which may be that of the look before."""
        if self._open is None or time.monotonic() - self._since_s >= SHARED_S:
            self._end()
            begun = ExitStack()
            self._txn = begun.enter_context(self._env.reading())
            self._open, self._since_s = begun, time.monotonic()
        try:
            yield self._txn
        except BaseException:
            failed, self._open = self._open, None
            if failed is None or not failed.__exit__(*sys.exc_info()):  # which puts errors of LMDB into words
                raise

    def _end(self) -> None:
        ended, self._open = self._open, None
        if ended is not None:
            ended.close()

    def __enter__(self) -> Moments:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
