"""`qflow users`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import click

from qflow.cli import facts, options
from qflow.errors import InvalidArgument, NotFound, PermissionDenied, StorageError

if TYPE_CHECKING:
    from qflow.serving.users import Account, Permission, Users

_MOST_PASSWORD_BYTES = 4096
_file = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_user = click.argument("name", metavar="USER")


@click.group()
def users() -> None:
    """Change a users file, for `qflow serve --users FILE`.

    A server reads it at its start, and again on SIGHUP. It has hashes of passwords (scrypt), never a password; it is
    JSON, made with mode 0600, and may be edited by hand.

    A password is asked for on a terminal; else it is the first line of stdin.
    """


@users.command(short_help="Add a user.")
@_file
@_user
@click.option("--tag", "tags", multiple=True, help="Such as `administrator`; may be given several times.")
def add(file: Path, name: str, tags: tuple[str, ...]) -> None:
    """Add USER to FILE, which is made if it is missing; the user may do nothing yet, see `qflow users permit`.

    \b
    Examples:
      qflow users add users.json anna --tag administrator
    """
    from qflow.serving.passwords import PasswordHash
    from qflow.serving.users import Account, User, check_text

    user = User(check_text(name, "user"), frozenset(check_text(tag, "tag") for tag in tags))
    password = PasswordHash.of(_password())

    def added(users: Users) -> Users:
        if name in users.accounts:
            raise InvalidArgument(f"there is a user {name!r}; `qflow users passwd` changes the password")
        return _with(users, Account(user, password))

    _change(file, added, create=True)
    click.echo(f"user {facts.readable(name)} is added, and may do nothing yet: see `qflow users permit`")


@users.command(short_help="Change the password of a user.")
@_file
@_user
def passwd(file: Path, name: str) -> None:
    """Change the password of USER. A server that runs takes it at the next SIGHUP.

    \b
    Examples:
      qflow users passwd users.json anna
    """
    from qflow.serving.passwords import PasswordHash

    password = PasswordHash.of(_password())

    def with_password(users: Users) -> Users:
        return _with(users, attrs.evolve(_account(users, name), password=password))

    _change(file, with_password)


@users.command(short_help="Remove a user.")
@_file
@_user
def remove(file: Path, name: str) -> None:
    """Remove USER, with all permissions.

    \b
    Examples:
      qflow users remove users.json anna
    """

    def removed(users: Users) -> Users:
        _account(users, name)
        left = {other: account for other, account in users.accounts.items() if other != name}
        return attrs.evolve(users, accounts=MappingProxyType(left))

    _change(file, removed)


@users.command(short_help="Say what a user may do.")
@_file
@_user
@click.option("--vhost", "virtual_host", metavar="NAME", default="/", show_default=True, help="The virtual host.")
@click.option("--configure", metavar="REGEX", help="Names of what the user may declare and delete.")
@click.option("--write", metavar="REGEX", help="Names of what the user may publish to.")
@click.option("--read", metavar="REGEX", help="Names of what the user may consume from.")
@click.option("--all", "everything", is_flag=True, help="Everything there; the same as '.*' for each of the three.")
@click.option("--none", "nothing", is_flag=True, help="Nothing, and the user may not enter it.")
@click.option("--publish", metavar="FILTER", multiple=True, help="MQTT topics the user may publish to.")
@click.option("--subscribe", metavar="FILTER", multiple=True, help="MQTT topics the user may subscribe to.")
@click.option("--no-topics", is_flag=True, help="No MQTT topic at all.")
def permit(
    file: Path,
    name: str,
    virtual_host: str,
    configure: str | None,
    write: str | None,
    read: str | None,
    everything: bool,
    nothing: bool,
    publish: tuple[str, ...],
    subscribe: tuple[str, ...],
    no_topics: bool,
) -> None:
    """Say what USER may do in a virtual host of AMQP, or with topics of MQTT, in place of what was said before of that.

    A virtual host that is not there yet is made. A regular expression is searched for in a name: 'a' allows all names
    that have an a in them, '^a$' that name alone. What is not given allows nothing.

    A FILTER is one of MQTT, such as 'plant/+/heat' or 'plant/#'; %c in it stands for the client id, %u for the name of
    the user. The two options may be given several times. Who may subscribe to 'plant/#' may subscribe to what is within
    it, and to nothing else.

    \b
    Examples:
      qflow users permit users.json anna --all
      qflow users permit users.json sensor --publish 'plant/%c/#' --subscribe 'plant/#'
    """
    from qflow.serving.users import Permission, Topics, check_text

    hosts = (any(each is not None for each in (configure, write, read)), everything, nothing).count(True)
    topics = (bool(publish or subscribe), no_topics).count(True)
    if hosts > 1 or topics > 1 or not hosts + topics:
        raise click.UsageError(
            "give --all, or --none, or one or more of --configure, --write and --read; "
            "or one or more of --publish and --subscribe, or --no-topics"
        )
    check_text(virtual_host, "virtual host")
    granted = (
        None if nothing else Permission(*(".*" if everything else each or "" for each in (configure, write, read)))
    )
    permitted_topics = Topics(publish, subscribe)

    def permitted(users: Users) -> Users:
        if hosts:
            users = _with_permission(users, name, virtual_host, granted)
        if topics:
            account = _account(users, name)
            users = _with(users, attrs.evolve(account, user=attrs.evolve(account.user, topics=permitted_topics)))
        return users

    _change(file, permitted)


@users.command("list", short_help="List users, and what they may do.")
@_file
@options.as_json
def list_users(file: Path, as_json: bool) -> None:
    """List the users of FILE with their tags and permissions.

    \b
    Examples:
      qflow users list users.json
    """
    from qflow.serving.users import ACTIONS, DIRECTIONS, Users, rights_of

    said = Users.load(file)
    rows = [{"user": name, **rights_of(account.user)} for name, account in said.accounts.items()]
    if as_json:
        facts.print_json({"virtual_hosts": said.virtual_hosts, "users": rows})
        return
    headings = ("user", "tags", "virtual host", *ACTIONS, *DIRECTIONS)
    cells = [
        (facts.readable(row["user"]), " ".join(row["tags"]), *granted, *_topics(row["topics"]))
        for row in rows
        for granted in [
            (facts.readable(host), *map(facts.readable, may.values())) for host, may in row["permissions"].items()
        ]
        or [("",) * 4]
    ]
    facts.print_table(headings, cells)


def _topics(filters: dict[str, tuple[str, ...]]) -> list[str | None]:
    """Return the filters of a user, those of each direction as one text."""
    return [", ".join(map(facts.readable, those)) or None for those in filters.values()]


def _change(file: Path, changed: Callable[[Users], Users], *, create: bool = False) -> None:
    from qflow.serving.users_file import change

    try:
        change(file, changed, create=create)
    except OSError as error:
        kind = PermissionDenied if isinstance(error, PermissionError) else StorageError
        raise kind(
            f"cannot change the users file {str(file)!r}: {error.strerror or error}; it is as it was: mend that "
            "(`df -h` shows where a disk is full) and try again"
        ) from error


def _account(users: Users, name: str) -> Account:
    found = users.accounts.get(name)
    if found is None:
        names = ", ".join(map(facts.readable, users.accounts)) or "none"
        raise NotFound(f"there is no user {name!r}; there are: {names}")
    return found


def _with_permission(users: Users, name: str, virtual_host: str, permission: Permission | None) -> Users:
    """Return users of whom one has another permission in a virtual host, or none; the host is made."""
    account = _account(users, name)
    granted = dict(account.user.permissions)
    granted.pop(virtual_host, None)
    if permission is not None:
        granted[virtual_host] = permission
        if virtual_host not in users.virtual_hosts:
            users = attrs.evolve(users, virtual_hosts=(*users.virtual_hosts, virtual_host))
    user = attrs.evolve(account.user, permissions=MappingProxyType(granted))
    return _with(users, attrs.evolve(account, user=user))


def _with(users: Users, account: Account) -> Users:
    """Return users with one more, or another one of the name."""
    accounts = {**users.accounts, account.user.name: account}
    return attrs.evolve(users, accounts=MappingProxyType(accounts))


def _password() -> str:
    """Ask for a password on a terminal, or take the first line of stdin; never an argument, which others could see."""
    if sys.stdin is None:  # it was closed from the start
        line = b""
    elif sys.stdin.isatty():
        return click.prompt("Password", type=str, hide_input=True, confirmation_prompt=True, err=True)
    else:
        line = sys.stdin.buffer.readline(_MOST_PASSWORD_BYTES + 2)
    password = line.removesuffix(b"\n").removesuffix(b"\r")
    if not password or len(password) > _MOST_PASSWORD_BYTES:
        raise InvalidArgument(f"a password, of 1 to {_MOST_PASSWORD_BYTES} bytes, must be the first line of stdin")
    return password.decode(errors="surrogateescape")
