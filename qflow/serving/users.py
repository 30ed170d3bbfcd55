"""Users, what they may do, and the text of a users file.

A users file is JSON, for people to read and edit:

    {
      "virtual_hosts": ["/"],
      "users": {
        "anna": {
          "password": "scrypt$n=16384,r=8,p=1$SALT$DIGEST",
          "tags": ["administrator"],
          "permissions": {
            "/": {"configure": "^anna\\\\.", "write": ".*", "read": ".*"}
          },
          "topics": {
            "publish": ["plant/%c/#"], "subscribe": ["plant/#", "news/%u"]
          }
        }
      }
    }

A user may configure, write or read what has a name, in a virtual host where a regular expression of theirs for that is
found in the name: anywhere in it, as RabbitMQ has it, so `^` and `$` say where it is whole. An empty one is found in
the empty name alone. Who has permissions in a virtual host, of whatever kind, may enter it.

Topics of MQTT are permitted by its filters, where `%c` stands for the client id and `%u` for the name of the user.
What is not there allows nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import attrs

from qflow.errors import InvalidArgument, NotFound
from qflow.serving.addresses import Address, ip_address, is_loopback, is_of_this_machine_alone
from qflow.serving.passwords import PasswordHash
from qflow.streams.topic_filter import check_filter

T = TypeVar("T")
Action = Literal["configure", "write", "read"]
ACTIONS: tuple[Action, ...] = ("configure", "write", "read")
DIRECTIONS = ("publish", "subscribe")
ADMINISTRATOR = "administrator"
DEFAULT_VIRTUAL_HOST = "/"
MAX_NAME_BYTES = 255
"""Of a user, a virtual host or a tag: protocols have no room for more."""
_MOST_FILE_BYTES = 2**26
_KINDS = {"str": "a text", "list": "a list", "dict": "an object {...}"}


def expression(text: str) -> re.Pattern[str]:
    """Return a regular expression of a permission. Raises InvalidArgument: it is none."""
    try:
        return re.compile(text or "^$")
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{text!r} is no regular expression: {error}") from error


@attrs.frozen
class Permission:
    """What a user may configure, write and read in a virtual host, as expressions that names are searched for."""

    configure: re.Pattern[str] = attrs.field(converter=expression)
    write: re.Pattern[str] = attrs.field(converter=expression)
    read: re.Pattern[str] = attrs.field(converter=expression)


def _filters(filters: Iterable[str]) -> tuple[str, ...]:
    return tuple(check_filter(each) for each in dict.fromkeys(filters))


@attrs.frozen
class Topics:
    """What an MQTT client of a user may publish to and subscribe to, as filters.

    In these `%c` stands for the client id, and `%u` for the name of the user.

    Raises:
        InvalidArgument: one of them is no filter.
    """

    publish: tuple[str, ...] = attrs.field(default=(), converter=_filters)
    subscribe: tuple[str, ...] = attrs.field(default=(), converter=_filters)


@attrs.frozen
class User:
    """Somebody who has logged in, or may. It is what the file said when it was read: a later one has users of its own.

    Args:
        name: of 1 to 255 bytes.
        tags: such as `administrator`.
        permissions: by virtual host.
        topics: of MQTT.
    """

    name: str
    tags: frozenset[str] = frozenset()
    permissions: Mapping[str, Permission] = attrs.field(factory=lambda: MappingProxyType({}))
    topics: Topics = Topics()

    @property
    def is_administrator(self) -> bool:
        return ADMINISTRATOR in self.tags

    def may_enter(self, virtual_host: str) -> bool:
        """Tell whether there are permissions in a virtual host."""
        return virtual_host in self.permissions

    def may(self, action: Action, virtual_host: str, name: str) -> bool:
        """Tell whether the user may do that with what has this name. Cost: one search, some 0.5 µs for `.*`."""
        permission = self.permissions.get(virtual_host)
        if permission is None:
            return False
        wanted: re.Pattern[str] = getattr(permission, action)
        return wanted.search(name) is not None


@attrs.frozen
class Account:
    """A user, and the hash of the password."""

    user: User
    password: PasswordHash


@attrs.frozen
class Users:
    """What a users file says, as a value: accounts by the names of users, and virtual hosts that exist."""

    accounts: Mapping[str, Account] = attrs.field(factory=lambda: MappingProxyType({}))
    virtual_hosts: tuple[str, ...] = (DEFAULT_VIRTUAL_HOST,)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Users:
        """Read a users file.

        Raises:
            NotFound: there is none. InvalidArgument: it is not as it should be; the text says where. OSError: it
                cannot be read.
        Cost: one read; 10 µs for each user.
        """
        file = Path(path)
        try:
            with file.open("rb") as opened:
                text = opened.read(_MOST_FILE_BYTES + 1)
        except FileNotFoundError as error:
            raise NotFound(f"there is no users file {str(file)!r}; `qflow users add` makes one") from error
        except IsADirectoryError as error:
            raise InvalidArgument(f"the users file {str(file)!r} is a directory") from error
        if len(text) > _MOST_FILE_BYTES:
            raise InvalidArgument(f"the users file {str(file)!r} is larger than 64 MiB")
        try:
            return parse(text)
        except InvalidArgument as error:
            raise InvalidArgument(f"the users file {str(file)!r} is wrong: {error}") from error

    def get(self, name: str) -> User | None:
        """Return a user without a look at the password, as for one whom a certificate has shown."""
        account = self.accounts.get(name)
        return None if account is None else account.user

    def text(self) -> str:
        """Return the text of a file that says the same."""
        users = {name: _as_json(account) for name, account in self.accounts.items()}
        return json.dumps({"virtual_hosts": self.virtual_hosts, "users": users}, indent=2, ensure_ascii=False) + "\n"


async def check_users(users: object, host: str) -> None:
    """Refuse what are no users, and an address that other machines can reach without any. Raises InvalidArgument.

    A name is looked up in a thread: that may take seconds.
    """
    if users is not None and not isinstance(users, Users):
        raise InvalidArgument(f"users are what Users.load(FILE) of qflow.serving.users returns, not {users!r}")
    if users is not None or host == "localhost" or is_loopback(host):
        return
    if ip_address(host) is not None or not await asyncio.to_thread(is_of_this_machine_alone, Address(host, 0)):
        raise InvalidArgument(
            f"{host!r} can be reached from other machines: give users, or listen on 127.0.0.1, ::1 or localhost"
        )


def check_text(name: str, what: str) -> str:
    """Return a valid name of a user, a virtual host or a tag: printable, 1 to 255 bytes of UTF-8."""
    if not name.isprintable() or not 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES:
        raise InvalidArgument(f"the name of a {what} has 1 to {MAX_NAME_BYTES} printable bytes, not {name[:80]!r}")
    return name


def parse(text: bytes) -> Users:
    """Return what the text of a users file says. Raises InvalidArgument: it is wrong; the text says where."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"it is not UTF-8, at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise InvalidArgument("it is nested too deeply") from error
    fields = _fields(value, "it", {"virtual_hosts": list, "users": dict})
    hosts = _texts(fields.get("virtual_hosts", [DEFAULT_VIRTUAL_HOST]), "virtual host", '"virtual_hosts"')
    accounts = {name: _account(name, user, hosts) for name, user in fields.get("users", {}).items()}
    return Users(MappingProxyType(accounts), tuple(hosts))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; the second of two fields of one name would win, and nobody see it."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidArgument(f"{name!r} is there twice")
        found[name] = value
    return found


def _account(name: str, value: Any, virtual_hosts: list[str]) -> Account:
    what = f"user {check_text(name, 'user')!r}"
    kinds = {"password": str, "tags": list, "permissions": dict, "topics": dict}
    fields = _fields(value, what, kinds, needed={"password"})
    password = _within(f"the password of {what}", PasswordHash.parse, fields["password"])
    tags = _texts(fields.get("tags", []), "tag", f"the tags of {what}")
    permissions = {}
    for host, granted in fields.get("permissions", {}).items():
        where = f"the permissions of {what} in {host!r}"
        if host not in virtual_hosts:
            raise InvalidArgument(f'{where}: "virtual_hosts" has no such virtual host')
        said = _fields(granted, where, dict.fromkeys(ACTIONS, str), needed=set(ACTIONS))
        permissions[host] = _within(where, lambda said: Permission(**said), said)
    topics = _topics(fields.get("topics", {}), f"the topics of {what}")
    return Account(User(name, frozenset(tags), MappingProxyType(permissions), topics), password)


def _topics(value: dict[str, Any], what: str) -> Topics:
    said = _fields(value, what, dict.fromkeys(DIRECTIONS, list))
    for filters in said.values():
        if not all(isinstance(each, str) for each in filters):
            raise InvalidArgument(f"{what} must be lists of texts")
    return _within(what, lambda said: Topics(**said), said)


def _fields(value: Any, what: str, kinds: Mapping[str, type], *, needed: set[str] | None = None) -> dict[str, Any]:
    """Return the fields of a JSON object, each known and of its kind."""
    if not isinstance(value, dict):
        raise InvalidArgument(f"{what} must be an object {{...}}")
    for name, field in value.items():
        if name not in kinds:
            raise InvalidArgument(f"{what} has {name!r}, which is none of {', '.join(kinds)}")
        if not isinstance(field, kinds[name]):
            raise InvalidArgument(f"{name!r} of {what} must be {_KINDS[kinds[name].__name__]}")
    missing = sorted((needed or set()) - set(value))
    if missing:
        raise InvalidArgument(f"{what} has no {missing[0]!r}")
    return value


def _texts(values: list[Any], kind: str, what: str) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise InvalidArgument(f"{what} must be a list of texts")
    return [check_text(value, kind) for value in dict.fromkeys(values)]


def _within(what: str, make: Callable[[Any], T], value: Any) -> T:
    try:
        return make(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{what}: {error}") from error


def _as_json(account: Account) -> dict[str, Any]:
    said = {"password": str(account.password), **rights_of(account.user)}
    if account.user.topics == Topics():
        del said["topics"]
    return said


def rights_of(user: User) -> dict[str, Any]:
    """Return what a user may do, as JSON has it."""
    return {
        "tags": sorted(user.tags),
        "permissions": {
            host: {action: getattr(granted, action).pattern for action in ACTIONS}
            for host, granted in user.permissions.items()
        },
        "topics": attrs.asdict(user.topics),
    }
