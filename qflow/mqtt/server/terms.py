"""What clients are told when they come: how long sessions last at the most, and how often a client is to be heard."""

from __future__ import annotations

from typing import Any, TypedDict

import attrs

from qflow.durations import Duration, seconds_of
from qflow.errors import InvalidArgument
from qflow.mqtt.wire.packets import MQTT_5, NEVER_EXPIRES_S, Connect

MOST_KEEP_ALIVE_S = 65_535
MOST_REFERENCE_BYTES = 1024


class TermsOptions(TypedDict, total=False):
    """Arguments of `serve`."""

    max_keep_alive_s: Duration | None
    """Clients of MQTT 5 that want a longer keep-alive, or none, are told this one."""
    max_session_expiry_s: Duration | None
    """Sessions that are to last longer without clients last so long. Those of 3.1.1 have no end otherwise; clients
    of MQTT 5 are told. Sessions that sleep keep what they were given when their clients came."""

    redirect: str | None
    """Nobody is taken: clients of MQTT 5 are told to use this server instead, such as `other.example:1883`."""

    redirect_permanent: bool
    """They are to use it from now on, since this server has moved there."""


def _whole(value: Any) -> Any:
    """Return whole seconds, of a duration; anything else as it is."""
    seconds = seconds_of(value)
    return value if seconds is None or seconds % 1 else int(seconds)


def _check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    most = MOST_KEEP_ALIVE_S if attribute.name == "max_keep_alive_s" else NEVER_EXPIRES_S - 1
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise InvalidArgument(f"{attribute.name} is a number of seconds from 1 to {most:,}, not {value!r}")


def check_reference(reference: object) -> None:
    """Refuse what is no reference to servers, with blanks between: MQTT 5.0, section 4.11. Raises InvalidArgument."""
    if (
        not isinstance(reference, str)
        or not 0 < len(reference.encode(errors="replace")) <= MOST_REFERENCE_BYTES
        or not reference.isprintable()
        or reference.strip() != reference
    ):
        raise InvalidArgument(
            f"a server is referred to by a text such as 'other.example:1883', of at most {MOST_REFERENCE_BYTES} bytes "
            f"without line ends, not by {reference!r:.80}"
        )


def check_permanent(reference: object, permanent: object) -> None:
    """Refuse a move for good that leads nowhere. Raises InvalidArgument."""
    if not isinstance(permanent, bool):
        raise InvalidArgument(f"a redirect is permanent or not: True or False, not {permanent!r:.80}")
    if permanent and reference is None:
        raise InvalidArgument("a permanent redirect leads to another server: say which one")


def _check_redirect(_: object, __: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        check_reference(value)


@attrs.frozen(kw_only=True)
class Terms:
    """See `TermsOptions`.

    Raises:
        InvalidArgument: a number is out of its bounds, a server is referred to by what is no text, or a permanent
            redirect leads nowhere.
    """

    max_keep_alive_s: int | None = attrs.field(default=None, converter=_whole, validator=_check)
    max_session_expiry_s: int | None = attrs.field(default=None, converter=_whole, validator=_check)
    redirect: str | None = attrs.field(default=None, validator=_check_redirect)
    redirect_permanent: bool = attrs.field(default=False)

    @redirect_permanent.validator
    def _check_permanent(self, _: object, value: object) -> None:
        check_permanent(self.redirect, value)

    def keep_alive_s(self, connect: Connect) -> int:
        """Return the keep-alive of a client; 0: none."""
        most_s, wanted_s = self.max_keep_alive_s, connect.keep_alive_s
        return wanted_s if most_s is None or connect.version < MQTT_5 or 0 < wanted_s <= most_s else most_s

    def session_expiry_s(self, wanted_s: int) -> int:
        """Return how long a session lasts without its client that is to last so long."""
        return wanted_s if self.max_session_expiry_s is None else min(wanted_s, self.max_session_expiry_s)


NO_TERMS = Terms()
