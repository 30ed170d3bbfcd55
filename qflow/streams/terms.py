"""What a subscription is asked for with."""

from __future__ import annotations

from typing import Literal

from qflow.config import check_name, parse_span
from qflow.errors import InvalidArgument
from qflow.options import Start
from qflow.settings import Settings, setting
from qflow.streams.topic_filter import check_filter

GROUP_ACK_TIMEOUT_S = 60.0
"""Seconds a member of a group may hold a message, unless `ack_timeout_s` is given."""
STARTS = ("latest", "earliest", "committed")


class Terms(Settings):
    """The arguments of `Broker.subscribe`; see `SubscriptionOptions`."""

    filter: str = setting(default="")
    name: str | None = setting(default=None)
    start: Start = setting(default="latest")
    group: str | None = setting(default=None)
    session_expiry_s: float | None = setting(parse_span, default=None)
    follow: bool = setting(default=True)
    ack_timeout_s: float | None = setting(parse_span, default=None)
    on_gap: Literal["raise", "skip"] = setting(default="raise")

    @property
    def title(self) -> str | None:
        """The name in the log, of a durable subscription or a group; None if it is neither."""
        return self.name if self.group is None else self.group

    def checked(self) -> Terms:
        """Return the terms, with defaults filled in. Raises InvalidArgument: they are wrong, or exclude each other."""
        topic_filter, name, group, start = self.filter, self.name, self.group, self.start
        session_expiry_s, ack_timeout_s = self.session_expiry_s, self.ack_timeout_s
        if isinstance(topic_filter, str) and topic_filter.startswith("$share/"):
            raise InvalidArgument(
                f"filter {topic_filter:.120} is a shared subscription of MQTT: give its filter alone, and its name as "
                "group="
            )
        check_filter(topic_filter)
        if self.on_gap not in ("raise", "skip"):
            raise InvalidArgument(f'on_gap must be "raise" or "skip", got {self.on_gap!r}')
        if not isinstance(self.follow, bool):
            raise InvalidArgument(f"follow must be True or False, got {self.follow!r}")
        if name is not None and group is not None:
            raise InvalidArgument(
                "name= and group= do not go together: a group is known by its own name, and its members have none"
            )
        if name is not None:
            check_name(name, "subscription")
        if group is not None:
            check_name(group, "group")
        if isinstance(start, str) and start not in STARTS:
            raise InvalidArgument(f"start must be one of {', '.join(STARTS)}, an offset or a datetime, got {start!r}")
        if self.title is None and session_expiry_s is not None:
            raise InvalidArgument(
                "session_expiry_s is for subscriptions with a name or a group: others end when closed"
            )
        if ack_timeout_s is None and group is not None:
            ack_timeout_s = GROUP_ACK_TIMEOUT_S
        if ack_timeout_s == 0:
            raise InvalidArgument("ack_timeout_s must be more than 0 seconds; None is no time-out")
        if session_expiry_s == 0:
            raise InvalidArgument(
                "session_expiry_s must be more than 0 seconds: what ends when it is closed needs no name, and None "
                "leaves it as it is"
            )
        return self.changed(ack_timeout_s=ack_timeout_s)
