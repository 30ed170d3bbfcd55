"""Commands as JSON, looked at: they come from other hosts. Errors as sentences, with the class by name beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.flight as pf

from qflow.config import MAX_PARTITIONS
from qflow.errors import BrokerClosed, InvalidArgument, QflowError
from qflow.loggers import get_logger
from qflow.message import LANE_SHIFT
from qflow.remote.wire.errors import decode_error, encode_error

MOST_COMMAND_BYTES = 16 * 2**20
MOST_TEXT_BYTES = 1500
"""Of an error, as gRPC encodes it. A client takes 16 KiB for its text, in two encodings, and its facts; of more, it has
nothing, not even the class."""
_logger = get_logger("qflow")


class Command:
    """The object of a command, ticket or action; `what` it is, for errors."""

    def __init__(self, value: Mapping[str, Any], what: str) -> None:
        self.value = value
        self.what = what

    @classmethod
    def parse(cls, data: bytes, what: str) -> Command:
        """Return a command. Nothing at all stands for `{}`. Raises InvalidArgument: it is no object in JSON."""
        if len(data) > MOST_COMMAND_BYTES:
            raise InvalidArgument(f"{what} takes {MOST_COMMAND_BYTES:,} bytes at most, and this one has {len(data):,}")
        try:
            value = json.loads(data) if data else {}
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{what} must be JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidArgument(f"{what} must be an object in JSON, not {_shown(value)}")
        return cls(value, what)

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def check_known(self, *names: str) -> None:
        """Raises InvalidArgument: it has another one, which would be taken for heeded."""
        for name in self.value:
            if name not in names:
                raise InvalidArgument(f"{_shown(name)} is none of {', '.join(names)}, which {self.what} may have")

    def _checked(self, name: str, kind: type | tuple[type, ...], words: str) -> Any:
        value = self.value.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise InvalidArgument(f"{name!r} of {self.what} must be {words}, not {_shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text. Raises InvalidArgument: it is none, or missing and there is no default."""
        if name not in self and default is not None:
            return default
        return _check_utf8(str(self._checked(name, str, "a text")), f"{name!r} of {self.what}")

    def maybe_text(self, name: str) -> str | None:
        """Return a text, None if it is missing. Raises InvalidArgument: it is something else."""
        return self.text(name) if name in self else None

    def number(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        """Return an int. Raises InvalidArgument: it is none, or too small, or missing and there is no default."""
        if name not in self and default is not None:
            return default
        value = int(self._checked(name, int, "a whole number"))
        if not least <= value < 2**63:
            raise InvalidArgument(f"{name!r} of {self.what} must be at least {least}, not {value}")
        return value

    def maybe_number(self, name: str, *, least: int = 0) -> int | None:
        """Return an int, None if it is missing. Raises as `number`."""
        return self.number(name, least=least) if name in self else None

    def seconds(self, name: str, default: float, *, most: float = 86_400.0) -> float:
        """Return seconds. Raises InvalidArgument: it is no such number."""
        if name not in self:
            return default
        value = self._checked(name, (int, float), "seconds")
        if not 0 < value <= most:
            raise InvalidArgument(f"{name!r} of {self.what} must be above 0 and at most {most:g}, not {_shown(value)}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return True or False. Raises InvalidArgument: it is neither."""
        return bool(self._checked(name, bool, "true or false")) if name in self else default

    def items(self, name: str, default: list[Any] | None = None) -> list[Any]:
        """Return a list. Raises InvalidArgument: it is none, or missing and there is no default."""
        if name not in self and default is not None:
            return default
        return list(self._checked(name, list, "a list"))

    def texts(self, name: str) -> list[str]:
        """Return a list of texts. Raises InvalidArgument: it is none."""
        found = self.items(name)
        if not all(isinstance(one, str) for one in found):
            raise InvalidArgument(f"{name!r} of {self.what} must be a list of texts, not {_shown(found)}")
        return [_check_utf8(one, f"a text of {name!r} of {self.what}") for one in found]

    def rows(self, name: str, *kinds: type) -> list[list[Any]]:
        """Return a list of lists of values of these types. Raises InvalidArgument: it is none."""
        found = self.items(name)
        for row in found:
            is_row = isinstance(row, list) and len(row) == len(kinds)
            if not is_row or not all(type(one) is kind for one, kind in zip(row, kinds, strict=True)):
                words = ", ".join(kind.__name__ for kind in kinds)
                raise InvalidArgument(f"{name!r} of {self.what} must be a list of [{words}], it has {_shown(row)}")
        return found

    def row(self, name: str, *kinds: type) -> list[Any]:
        """Return a list of values of these types. Raises InvalidArgument: it is none."""
        return Command({name: [self.value.get(name)]}, self.what).rows(name, *kinds)[0]

    def object(self, name: str) -> Command:
        """Return an object, `{}` if it is missing. Raises InvalidArgument: it is something else."""
        return Command(self._checked(name, dict, "an object") if name in self else {}, f"{name!r} of {self.what}")

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers. Raises InvalidArgument: it is none."""
        found = self.items(name)
        if not all(type(one) is int for one in found):
            raise InvalidArgument(f"{name!r} of {self.what} must be a list of whole numbers, not {_shown(found)}")
        return found

    def offsets(self, name: str) -> dict[str, dict[int, int]]:
        """Return numbers by partition, by what they are of. Raises InvalidArgument: they are none."""
        return {key: self._by_partition(name, parts, int) for key, parts in self.object(name).value.items()}

    def by_partition(self, name: str) -> dict[int, int]:
        """Return offsets by partition. Raises InvalidArgument: they are none."""
        return self._positions(name, self.object(name).value)

    def texts_by_partition(self, name: str) -> dict[int, str]:
        """Return texts by partition. Raises InvalidArgument: they are none."""
        return self._by_partition(name, self.object(name).value, str)

    def numbered(self, name: str) -> dict[int, dict[int, int]]:
        """Return offsets by partition, by the number of a stream. Raises InvalidArgument: they are none."""
        found = {}
        for key, parts in self.object(name).value.items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**32):
                raise InvalidArgument(f"{name!r} of {self.what} is by the number of a stream, not {_shown(key)}")
            found[int(key)] = self._positions(name, parts)
        return found

    def _positions(self, name: str, parts: Any) -> dict[int, int]:
        found = self._by_partition(name, parts, int)
        for number, offset in found.items():
            if not (0 <= number < MAX_PARTITIONS and 0 <= offset < 2**LANE_SHIFT):
                raise InvalidArgument(
                    f"{name!r} of {self.what}: a partition has a number from 0 to {MAX_PARTITIONS - 1} and an offset "
                    f"from 0 on, not {number} and {offset}"
                )
        return found

    def _by_partition(self, name: str, parts: Any, kind: type) -> dict[int, Any]:
        try:
            found = {int(number): value for number, value in parts.items()}
        except (AttributeError, ValueError):
            found = None
        if found is None or not all(type(value) is kind for value in found.values()):
            what, such = ("texts", '"9f"') if kind is str else ("whole numbers", "23")
            raise InvalidArgument(
                f'{name!r} of {self.what} must be {what} by partition, such as {{"0": {such}}}, not {_shown(parts)}'
            )
        return found


def _check_utf8(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} must be a text of UTF-8, not {_shown(text)}") from None
    return text


def _shown(value: object) -> str:
    return f"{value!r:.100}"


def as_json(value: Any) -> bytes:
    """Return what is answered."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def flight_error(error: QflowError) -> pf.FlightError:
    """Return an error for a client: its sentence, and its class and facts as JSON in `extra_info`."""
    kind = pf.FlightUnavailableError if isinstance(error, BrokerClosed) else pf.FlightServerError
    text = shortened(str(error))
    return kind(" ".join(text.split()), as_json(encode_error(error) | {"text": text}))


def shortened(text: str) -> str:
    """Return a text without its middle, where it is too long for an error."""
    if _beginning(text, MOST_TEXT_BYTES) == text:
        return text
    half = MOST_TEXT_BYTES // 2
    return f"{_beginning(text, half)} ... {_beginning(text[::-1], half)[::-1]}"


def _beginning(text: str, most_bytes: int) -> str:
    """Return as much of a text as takes so many bytes, where all but printable ASCII is encoded by percents."""
    for number, character in enumerate(text):
        is_plain = " " <= character <= "~" and character != "%"
        most_bytes -= 1 if is_plain else 3 * len(character.encode("utf-8", "surrogatepass"))
        if most_bytes < 0:
            return text[:number]
    return text


def error_of(error: pa.ArrowException | OSError) -> QflowError | None:
    """Return the error that a server of ours raised; None if it did not."""
    if not isinstance(error, pf.FlightError):
        return None
    try:
        head = json.loads(error.extra_info or b"null")
    except ValueError:
        return None
    return decode_error(head) if isinstance(head, dict) and "error" in head else None


@contextmanager
def plainly(what: str) -> Iterator[None]:
    """Bring errors to the client as sentences. What nobody has expected is in the log of the owner, too."""
    try:
        yield
    except QflowError as error:
        raise flight_error(error) from None
    except pf.FlightError:
        raise
    except pa.ArrowCancelled:
        raise pf.FlightCancelledError("the client has left") from None
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise flight_error(InvalidArgument(f"{what}: the batches cannot be read: {error}")) from None
    except Exception as error:
        _logger.exception("%s of a client of Arrow Flight failed", what)
        text = shortened(f"the owner failed at this: {type(error).__name__}: {error}")
        raise pf.FlightInternalError(text) from None
