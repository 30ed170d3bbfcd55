"""The loggers of this package: as those of Python, but that what a handler raises is shown, and not raised."""

from __future__ import annotations

import io
import logging
import pickle
import sys
from collections.abc import Callable

import pytest

from faults.raising import Raising
from faults.seams import in_thread
from qflow.loggers import get_logger

LOGGER = logging.getLogger("qflow.test")
KINDS = [ValueError, OSError, RecursionError, SystemExit, KeyboardInterrupt, GeneratorExit]


class RaisingFilter(logging.Filter):
    """Raises as it is asked."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self._kind = kind

    def filter(self, record: logging.LogRecord) -> bool:
        raise self._kind("the handler")


def add_handler(kind: type[BaseException]) -> Callable[[], object]:
    """Have a handler raise; return what ends that."""
    handler = Raising(kind)
    LOGGER.addHandler(handler)
    return lambda: LOGGER.removeHandler(handler)


def add_filter(kind: type[BaseException]) -> Callable[[], object]:
    """Have a filter of the logger raise; return what ends that."""
    one = RaisingFilter(kind)
    LOGGER.addFilter(one)
    return lambda: LOGGER.removeFilter(one)


def set_factory(kind: type[BaseException]) -> Callable[[], object]:
    """Have no record be made; return what ends that."""
    before = logging.getLogRecordFactory()

    def make(*_: object, **__: object) -> logging.LogRecord:
        raise kind("the handler")

    logging.setLogRecordFactory(make)
    return lambda: logging.setLogRecordFactory(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", [add_handler, add_filter, set_factory])
def test_what_a_handler_raises_is_shown_with_the_message_and_not_raised(
    begin: Callable[[type[BaseException]], Callable[[], object]],
    kind: type[BaseException],
    capsys: pytest.CaptureFixture[str],
) -> None:
    end = begin(kind)
    try:
        in_thread(lambda: get_logger("qflow.test").warning("a line of %s", "text", extra={"event": "tested"}))
    finally:
        end()
    shown = capsys.readouterr().err
    assert f"{kind.__name__}: the handler" in shown
    assert "Message: 'a line of %s'\nArguments: ('text',)" in shown
    assert "test_loggers.py" in shown  # from where it was logged


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_main_thread_it_may_be_an_interrupt(
    kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    end = add_handler(kind)
    try:
        if issubclass(kind, Exception):
            get_logger("qflow.test").error("a line")
            assert "the handler" in capsys.readouterr().err
        else:
            with pytest.raises(kind, match="the handler"):
                get_logger("qflow.test").error("a line")
            assert capsys.readouterr().err == ""
    finally:
        end()


@pytest.mark.parametrize("way", ["off", "none", "closed"])
def test_where_it_is_not_to_be_shown_or_cannot_be_it_does_no_harm(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`logging.raiseExceptions` is what Python has for that."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", None if way == "none" else shown)
    monkeypatch.setattr(logging, "raiseExceptions", way != "off")
    end = add_handler(ValueError)
    try:
        if way == "closed":
            shown.close()
        get_logger("qflow.test").error("a line")
    finally:
        end()
    assert way == "closed" or shown.getvalue() == ""


@pytest.mark.parametrize("method", ["debug", "info", "warning", "error", "exception", "critical"])
def test_a_record_is_as_that_of_a_logger_of_python(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the file, the line and the function of who logs, what `extra` says, and the error that is handled."""
    caplog.set_level(logging.DEBUG, "qflow.test")
    try:
        raise ValueError("handled")
    except ValueError as error:
        logged = [getattr(one, method) for one in (LOGGER, get_logger("qflow.test"))]
        for log in logged:
            log("a %s", "line", exc_info=True, stack_info=False, extra={"event": "tested", "spool": "s"})
        handled = error
    same = [
        (one.name, one.levelno, one.getMessage(), one.pathname, one.lineno, one.funcName, vars(one)["event"])
        for one in caplog.records
    ]
    assert [one.exc_info and one.exc_info[1] for one in caplog.records] == [handled] * 2
    assert len(same) == 2
    assert same[0] == same[1]


def test_what_is_disabled_is_not_written_and_a_logger_can_be_pickled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "qflow.test")
    logger = pickle.loads(pickle.dumps(get_logger("qflow.test")))
    assert logger.logger is LOGGER
    logger.warning("nobody asks for it")
    logger.error("this")
    assert caplog.messages == ["this"]
