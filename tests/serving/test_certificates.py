"""When the certificate of a server is valid, and what is said of that."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from qflow.serving.certificates import DAY_S, Certificates, Validity

PEM = Path(__file__).parent / "certificates"
BEGINS_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def _of(days: float) -> Validity:
    return Validity(Path("server.pem"), BEGINS_S, BEGINS_S + days * DAY_S)


@pytest.mark.parametrize(
    ("days", "after_days", "said", "rest_days"),
    [
        (365, -1.5, "is not valid before 2026-01-01 00:00 UTC, and clients refuse it: look at the clock", 1),
        (365, -0.5, "is not valid before 2026-01-01 00:00 UTC, and clients refuse it: look at the clock", 0.5),
        (365, 0, None, 1),
        (365, 350.75, None, 0.25),
        (365, 351, "expires at 2027-01-01 00:00 UTC: renew it, and send SIGHUP", 1),
        (365, 364.75, "expires at 2027-01-01 00:00 UTC: renew it, and send SIGHUP", 0.25),
        (365, 365, "has expired at 2027-01-01 00:00 UTC, and clients refuse it: renew it, and send SIGHUP", 1),
        (10, 8, None, 1),  # it is renewed more often: the last tenth is soon
        (10, 9, "expires at 2026-01-11 00:00 UTC: renew it, and send SIGHUP", 1),
    ],
)
def test_a_certificate_that_is_not_valid_or_soon_no_more_is_told_of(
    days: float, after_days: float, said: str | None, rest_days: float
) -> None:
    """Fourteen days before, or the last tenth of its time; it is looked at once a day, and when that changes."""
    validity, now_s = _of(days), BEGINS_S + after_days * DAY_S
    assert validity.warning(now_s) == (None if said is None else f"the certificate 'server.pem' {said}")
    assert validity.rest_s(now_s) == pytest.approx(rest_days * DAY_S)


def test_the_first_certificate_of_a_file_is_that_of_the_server(tmp_path: Path) -> None:
    """Behind it are those between it and the one that clients trust."""
    chain = tmp_path / "chain.pem"
    chain.write_text((PEM / "expired.pem").read_text() + (PEM / "ca.pem").read_text())
    begins, ends = (datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (2020, 2021))
    assert Certificates(chain, PEM / "expired.key").validity() == Validity(chain, begins, ends)
    chain.write_text("")
    assert Certificates(chain, PEM / "expired.key").validity() is None
