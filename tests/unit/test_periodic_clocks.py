"""Schedules where clocks change: what is left out, and what comes twice, as the guide says."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from qflow.periodic import following, make_schedule

PLACE = "Europe/Berlin"
FORWARD, BACK = datetime(2026, 3, 29), datetime(2026, 10, 25)
"""At two the clocks show three; at three they show two."""


@pytest.mark.parametrize(
    ("cron", "day", "shown"),
    [
        ("30 2 * * *", FORWARD, ["29 03:00 +02", "30 02:30 +02"]),
        ("30 2 * * *", BACK, ["25 02:30 +02", "26 02:30 +01"]),
        ("*/30 2 * * *", FORWARD, ["30 02:00 +02", "30 02:30 +02"]),
        ("30 * * * *", FORWARD, ["29 00:30 +01", "29 01:30 +01", "29 03:30 +02"]),
        ("30 */2 * * *", BACK, ["25 00:30 +02", "25 02:30 +02", "25 02:30 +01", "25 04:30 +01"]),
    ],
)
def test_moments_of_a_day_on_which_clocks_change(cron: str, day: datetime, shown: list[str]) -> None:
    pytest.importorskip("cronsim")
    message = {"name": "nightly", "queue": "jobs", "body": b"", "headers": None}
    begun_s = day.replace(tzinfo=ZoneInfo(PLACE)).timestamp()
    one = make_schedule(message, every_s=None, cron=cron, time_zone=PLACE, now_s=begun_s)
    moments = [one.next_s]
    while len(moments) < len(shown):
        moments.append(following(one, moments[-1]))
    found = [datetime.fromtimestamp(moment, UTC).astimezone(ZoneInfo(PLACE)) for moment in moments]
    assert [moment.strftime("%d %H:%M %z")[:-2] for moment in found] == shown
