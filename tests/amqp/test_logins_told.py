"""The log tells of a login that was refused, as clients are told that it does."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import qflow.aio
import qflow.amqp
from doors.event_loop import run
from qflow.amqp.wire.events import Login
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, User, Users

USERS = Users(MappingProxyType({"anna": Account(User("anna"), PasswordHash.of("secret", n=2))}))


def certificate_of(name: str) -> dict[str, Any]:
    return {"subject": ((("commonName", name),),)}


@pytest.mark.parametrize(
    ("mechanism", "response", "certificate", "told"),
    [
        ("EXTERNAL", b"", certificate_of("anna"), None),
        ("EXTERNAL", b"", certificate_of("gone"), "a login as 'gone' from 192.0.2.1 was refused"),
        ("EXTERNAL", b"", None, "a login as '' from 192.0.2.1 was refused"),
        ("PLAIN", b"anna", None, "a login as '' from 192.0.2.1 was refused"),
        ("PLAIN", b"\0anna\0wrong", None, "a login as 'anna' from 192.0.2.1 was refused"),
    ],
)
def test_the_log_tells_of_a_login_that_was_refused(
    mechanism: str,
    response: bytes,
    certificate: dict[str, Any] | None,
    told: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where it brought no password: a certificate of nobody, or nothing that makes sense."""

    async def scenario() -> User | None:
        async with (
            qflow.aio.open(tmp_path) as broker,
            await qflow.amqp.serve(broker, port=0, users=USERS) as server,
        ):
            return await server.login(Login(mechanism, response, {}, "en_US"), "192.0.2.1", certificate)

    assert (run(scenario()) is None) is (told is not None)
    assert [line for line in caplog.messages if "login" in line] == ([] if told is None else [told])
