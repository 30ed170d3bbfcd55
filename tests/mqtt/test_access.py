"""Who may log in by MQTT, and which topics are theirs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from doors.event_loop import run
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.server.access import ANYTHING, REMEMBERED, Access, Gate, Permitted
from qflow.mqtt.wire.packets import MQTT_5, Connect
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, Topics, User, Users

CHEAP = PasswordHash.of("secret", n=2)
ANNA = User("anna", topics=Topics(("plant/%c/#", "news/%u"), ("plant/+/heat", "plant/%c/#", "$SYS/#")))
HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"
CERTIFICATE = {"subject": ((("countryName", "DE"),), (("commonName", "anna"),))}


def users(*known: User) -> Users:
    return Users(MappingProxyType({user.name: Account(user, CHEAP) for user in known}))


def login(
    known: Users | None,
    *,
    client_id: str = "c1",
    address: str = ELSEWHERE,
    certificate: dict[str, Any] | None = None,
    **said: Any,
) -> Access | None:
    async def scenario() -> Access | None:
        gate = Gate(known)
        try:
            return await gate.login(Connect(MQTT_5, client_id, **said), address, certificate)
        finally:
            gate.close()

    return run(scenario())


@pytest.mark.parametrize("said", [{}, {"username": "who", "password": b"ever"}])
def test_without_users_whoever_comes_from_this_machine_may_do_everything(said: dict[str, Any]) -> None:
    """Whatever name they give; who comes from another machine may not come in."""
    access = login(None, address=HERE, **said)
    assert access is not None
    assert access.may_publish("a/b")
    assert access.may_subscribe("#")
    assert login(None, **said) is None


@pytest.mark.parametrize(
    ("said", "comes_in"),
    [
        ({"username": "anna", "password": b"secret"}, True),
        ({"username": "anna", "password": b"secre"}, False),
        ({"username": "anna", "password": b"\xff"}, False),
        ({"username": "bob", "password": b"secret"}, False),
        ({"username": "anna"}, False),
        ({"password": b"secret"}, False),
        ({}, False),
        ({"certificate": CERTIFICATE}, True),
        ({"certificate": CERTIFICATE, "username": "anna"}, True),
        ({"certificate": CERTIFICATE, "username": "bob"}, False),
        ({"certificate": CERTIFICATE, "username": "anna", "password": b"wrong"}, False),
        ({"certificate": {"subject": ((("commonName", "bob"),),)}}, False),
        ({"certificate": {}}, False),
    ],
)
def test_a_user_shows_a_password_or_a_certificate(
    said: dict[str, Any], comes_in: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A password that is given has to be right, whatever the certificate says; the log tells of who is refused."""
    access = login(users(ANNA), **said)
    assert (access is not None) == comes_in
    if not said:
        assert login(users(ANNA), address=HERE) is None
    assert ("was refused" in caplog.text) is not comes_in


def test_a_user_may_do_what_filters_say_and_nothing_else() -> None:
    """A wider filter would bring what none of them matches."""
    access = Permitted(ANNA, "c1")
    for _ in range(2):  # the second answer is a remembered one
        assert access.may_publish("plant/c1/heat")
        assert access.may_publish("plant/c1")
        assert access.may_publish("news/anna")
        assert not access.may_publish("plant/c2/heat")
        assert not access.may_publish("news/%u")
        assert not access.may_publish("plant/%c/heat")
    assert access.may_subscribe("plant/+/heat")
    assert access.may_subscribe("plant/7/heat")
    assert access.may_subscribe("plant/c1/#")
    assert access.may_subscribe("$SYS/broker/#")
    assert not access.may_subscribe("plant/+/#")
    assert not access.may_subscribe("plant/#")
    assert not access.may_subscribe("#")
    assert not access.may_subscribe("plant/c2/cold")


def test_a_user_without_topics_may_do_nothing() -> None:
    """As of a users file that was written before there were any."""
    access = Permitted(User("anna"), "a/b")
    assert not access.may_publish("a")
    assert not access.may_subscribe("a")


def test_few_answers_are_remembered() -> None:
    """What a client asks for takes no more memory than that."""
    access = Permitted(User("anna", topics=Topics(("#",))), "c1")
    for number in range(3 * REMEMBERED):
        assert access.may_publish(f"a/{number}")
        assert access.may_publish("x" * 4096)
    assert len(access._may) <= REMEMBERED
    assert "x" * 4096 not in access._may


@pytest.mark.parametrize("client_id", ["", "+", "a/b", "#", "$SYS", "c#"])
def test_a_client_id_that_would_widen_a_filter_is_refused(client_id: str) -> None:
    """With the reason; without the variable any client id is as good as another."""
    with pytest.raises(MqttError, match="permitted by the client id") as raised:
        login(users(ANNA), client_id=client_id, username="anna", password=b"secret")
    assert raised.value.code is ReasonCode.CLIENT_ID_NOT_VALID
    access = Permitted(User("anna", topics=Topics(("x/%u",))), client_id)
    assert access.may_publish("x/anna")
    with pytest.raises(MqttError, match="permitted by the user name") as raised:
        Permitted(User("an/na", topics=Topics(("x/%u",))), "c1")
    assert raised.value.code is ReasonCode.NOT_AUTHORIZED


def test_a_value_is_no_variable_again() -> None:
    """A client whose id is `%u` gets no topics of its user."""
    access = Permitted(User("anna", topics=Topics(("x/%c/%u",))), "%u")
    assert access.may_publish("x/%u/anna")
    assert not access.may_publish("x/anna/anna")


def test_users_that_are_renewed_hold_for_who_is_there() -> None:
    """Who is none any more, or whose client id has no place in the new filters, may not stay."""
    access = Permitted(User("anna", topics=Topics(("y",))), "a/b")
    assert access.may_publish("y")
    assert access.renew(users(User("anna", topics=Topics(("z",)))))
    assert access.may_publish("z")
    assert not access.may_publish("y")
    assert not access.renew(users(ANNA))
    assert not access.may_publish("z"), "it may do nothing any more"
    assert not access.renew(users())
    assert not access.renew(None)
    assert ANYTHING.renew(None)
    assert not ANYTHING.renew(users(ANNA))


def test_users_that_are_renewed_hold_for_logins_to_come() -> None:
    """Without a new gate."""

    async def scenario() -> None:
        gate = Gate(users(ANNA))
        connect = Connect(MQTT_5, "c1", username="bob", password=b"secret")
        assert await gate.login(connect, HERE, None) is None
        gate.renew(users(User("bob")))
        assert await gate.login(connect, HERE, None) is not None
        gate.close()

    run(scenario())
