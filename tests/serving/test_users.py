"""Users files: what they say, what is wrong with them, and how they are changed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest

from qflow.errors import InvalidArgument, NotFound
from qflow.serving import users_file
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, Permission, Topics, User, Users, check_users, parse

CHEAP = PasswordHash.of("secret", n=2)


def file_of(**fields: Any) -> bytes:
    """Return the text of a file with one user, `anna`, who has these fields."""
    user = {"password": str(CHEAP), **fields}
    return json.dumps({"virtual_hosts": ["/", "shop"], "users": {"anna": user}}).encode()


def with_user(users: Users, name: str) -> Users:
    return attrs.evolve(users, accounts=MappingProxyType({**users.accounts, name: Account(User(name), CHEAP)}))


@pytest.mark.parametrize(
    ("expression", "name", "may"),
    [
        (".*", "anything", True),
        ("a", "banana", True),
        ("^a", "banana", False),
        ("^banana$", "banana", True),
        ("", "", True),
        ("", "banana", False),
        ("x|^b", "banana", True),
    ],
)
def test_an_expression_is_searched_for_in_a_name_and_an_empty_one_is_found_in_the_empty_name_alone(
    expression: str, name: str, may: bool
) -> None:
    """As RabbitMQ does it, where `re:run` searches."""
    user = User("anna", frozenset(), {"/": Permission("", expression, "")})
    assert user.may("write", "/", name) is may
    assert user.may("read", "/", name) is (name == "")
    assert not user.may("write", "shop", name)
    assert user.may_enter("/")
    assert not user.may_enter("shop")


def test_a_file_says_what_was_written_into_it() -> None:
    """Reading the text of users gives the same users."""
    permission = {"shop": {"configure": r"^a\.", "write": ".*", "read": ""}}
    topics = {"publish": ["plant/%c/#"], "subscribe": ["#", "#"]}
    users = parse(file_of(tags=["administrator"], permissions=permission, topics=topics))
    anna = users.get("anna")
    assert anna is not None
    assert anna.is_administrator
    assert anna.may("configure", "shop", "a.b")
    assert anna.topics == Topics(("plant/%c/#",), ("#",))
    assert parse(users.text().encode()) == users
    assert users.get("bob") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "line 1, column 1"),
        (b"{\n  'users'", "line 2, column 3"),
        (b"\xff", "not UTF-8"),
        (b"[]", "an object"),
        (b"[" * 100_000, "too deeply"),
        (b'{"users": []}', "'users' of it must be an object"),
        (b'{"users": {}, "users": {}}', "'users' is there twice"),
        (b'{"user": {}}', "'user', which is none of"),
        (b'{"virtual_hosts": [1]}', "list of texts"),
        (b'{"virtual_hosts": [""]}', "1 to 255"),
        (b'{"users": {"anna": {}}}', "user 'anna' has no 'password'"),
        (b'{"users": {"an\\u0000na": {}}}', "name of a user"),
        (file_of(password="secret"), "no hash such as"),
        (file_of(password="scrypt$n=536870912,r=8,p=1$AAAA$" + "A" * 24), "256 MiB"),
        (file_of(password="scrypt$n=3,r=8,p=1$AAAA$" + "A" * 24), "power of two"),
        (file_of(password="scrypt$n=2,r=8,p=1$AAAA$AAAA"), "3 bytes"),
        (file_of(password="scrypt$n=2,r=8,p=1$AA$" + "A" * 24), "base64"),
        (file_of(tags="administrator"), "'tags' of user 'anna' must be a list"),
        (file_of(permissions={"shop": {"write": ".*"}}), "has no 'configure'"),
        (file_of(permissions={"ship": {}}), "no such virtual host"),
        (file_of(topics=["a"]), "'topics' of user 'anna' must be an object"),
        (file_of(topics={"publish": "a"}), "'publish' of the topics of user 'anna' must be a list"),
        (file_of(topics={"publish": [1]}), "the topics of user 'anna' must be lists of texts"),
        (file_of(topics={"subscribe": ["a+"]}), "the topics of user 'anna': topic filter 'a+'"),
        (file_of(topics={"read": ["a"]}), "'read', which is none of publish, subscribe"),
        (file_of(permissions={"/": {"configure": "(", "write": "", "read": ""}}), "no regular expression"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_a_sentence_that_says_where(
    tmp_path: Path, text: bytes, said: str
) -> None:
    """Nothing in it is guessed, and no part of a wrong one counts."""
    file = tmp_path / "users.json"
    file.write_bytes(text)
    with pytest.raises(InvalidArgument) as raised:
        Users.load(file)
    assert said in str(raised.value)
    assert repr(str(file)) in str(raised.value)


def test_a_missing_file_and_a_directory_are_said_to_be_such(tmp_path: Path) -> None:
    """They are not taken for a file without users."""
    with pytest.raises(NotFound, match="there is no users file"):
        Users.load(tmp_path / "users.json")
    with pytest.raises(InvalidArgument, match="is a directory"):
        Users.load(tmp_path)


def test_a_hash_is_salted_and_matches_its_password_alone() -> None:
    """Two hashes of one password differ; a hash read from its text is the same."""
    other = PasswordHash.of("secret", n=2)
    assert str(other) != str(CHEAP)
    assert "secret" not in str(CHEAP)
    read = PasswordHash.parse(str(CHEAP))
    assert read.matches("secret")
    assert not read.matches("Secret")
    assert not read.matches("")
    assert PasswordHash.of("p\udcff", n=2).matches("p\udcff")


def test_a_file_that_is_changed_is_replaced_whole_for_its_owner_alone(tmp_path: Path) -> None:
    """It has mode 0600, a link to it stays one, and nothing else is left in the directory."""
    file, link = tmp_path / "users.json", tmp_path / "link.json"
    link.symlink_to(file)
    users_file.change(link, lambda users: with_user(users, "anna"), create=True)
    file.chmod(0o644)
    users_file.change(link, lambda users: with_user(users, "bob"))
    assert list(Users.load(file).accounts) == ["anna", "bob"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.json", "users.json"]


@pytest.mark.parametrize("failing", ["fsync", "fchmod", "rename"])
def test_a_change_that_fails_leaves_the_file_and_the_directory_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """At each step before the rename, which is the commit."""
    file = tmp_path / "users.json"
    users_file.change(file, lambda users: with_user(users, "anna"), create=True)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        users_file.change(file, lambda users: with_user(users, "bob"))
    monkeypatch.undo()
    assert list(Users.load(file).accounts) == ["anna"]
    assert os.listdir(tmp_path) == ["users.json"]


def test_a_change_makes_no_file_unless_it_may(tmp_path: Path) -> None:
    """A misspelt path is an error, and so is a directory that is not there."""
    with pytest.raises(NotFound):
        users_file.change(tmp_path / "users.json", lambda users: users)
    with pytest.raises(NotFound, match="no directory"):
        users_file.change(tmp_path / "nowhere" / "users.json", lambda users: users, create=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("found", "is_taken"),
    [
        (("127.0.1.1",), True),
        (("127.0.0.1", "::1"), True),
        (("127.0.1.1", "192.0.2.7"), False),
        (("192.0.2.7",), False),
    ],
)
def test_a_name_needs_users_where_it_stands_for_an_address_that_others_reach(
    found: tuple[str, ...], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian has the name of a machine stand for 127.0.1.1."""

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "own.test"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    if is_taken:
        asyncio.run(check_users(None, "own.test"))
    else:
        with pytest.raises(InvalidArgument, match="'own.test' can be reached from other machines"):
            asyncio.run(check_users(None, "own.test"))
