"""`qflow users`: a users file, changed from a shell."""

from __future__ import annotations

import errno
import os
import pty
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from doors.command_line import CommandLine
from qflow.cli.main import app
from qflow.serving import passwords
from qflow.serving.users import Users


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of `PasswordHash.of` is bound when it is defined."""
    monkeypatch.setitem(passwords.PasswordHash.of.__func__.__kwdefaults__, "n", 2)  # type: ignore[attr-defined]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where no users file is yet."""
    return tmp_path / "users.json"


def users(*arguments: object, stdin: str | bytes = "") -> Result:
    """Run `qflow users` in this process."""
    return CliRunner().invoke(app, ["users", *map(str, arguments)], input=stdin)


def test_a_user_is_added_permitted_listed_and_removed(file: Path) -> None:
    """The password is the first line of stdin; the file has its hash alone, and mode 0600."""
    assert users("add", file, "anna", "--tag", "administrator", stdin="secret\nmore\n").exit_code == 0
    assert users("add", file, "bob", stdin="other").exit_code == 0
    assert users("permit", file, "anna", "--all").exit_code == 0
    assert users("permit", file, "anna", "--vhost", "shop", "--write", r"^orders\.").exit_code == 0
    assert "secret" not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    listed = users("list", file).stdout.splitlines()
    assert [line.split() for line in listed] == [
        ["user", "tags", "virtual", "host", "configure", "write", "read", "publish", "subscribe"],
        ["anna", "administrator", "/", ".*", ".*", ".*", "-", "-"],
        ["anna", "administrator", "shop", "^$", r"^orders\.", "^$", "-", "-"],
        ["bob", "-", "-", "-", "-", "-", "-", "-"],
    ]
    said = Users.load(file)
    assert said.virtual_hosts == ("/", "shop")
    assert said.accounts["anna"].password.matches("secret")
    assert said.accounts["bob"].password.matches("other")
    assert users("permit", file, "anna", "--vhost", "shop", "--none").exit_code == 0
    assert users("remove", file, "bob").exit_code == 0
    said = Users.load(file)
    assert list(said.accounts) == ["anna"]
    assert list(said.accounts["anna"].user.permissions) == ["/"]
    assert '"user": "anna"' in users("list", file, "--json").stdout


def test_a_regular_expression_is_shown_and_not_obeyed_by_a_terminal(file: Path) -> None:
    """Nor does it make two lines of a row."""
    users("add", file, "anna", stdin="secret")
    assert users("permit", file, "anna", "--read", "a\x1bb", "--write", "c\nd").exit_code == 0
    assert users("list", file).stdout.splitlines()[1].split() == [
        "anna",
        "-",
        "/",
        "^$",
        r"'c\nd'",
        r"'a\x1bb'",
        "-",
        "-",
    ]


def test_topics_are_permitted_beside_virtual_hosts(file: Path) -> None:
    """Each in place of what was said before of it, the other stays."""
    users("add", file, "anna", stdin="secret")
    before = file.read_text()
    topics = ("--publish", "plant/%c/#", "--publish", "news", "--subscribe", "plant/#")
    assert users("permit", file, "anna", "--read", "a", *topics).exit_code == 0
    assert users("permit", file, "anna", "--vhost", "shop", "--all").exit_code == 0
    said = Users.load(file).accounts["anna"].user
    assert (said.topics.publish, said.topics.subscribe) == (("plant/%c/#", "news"), ("plant/#",))
    listed = [line.split() for line in users("list", file).stdout.splitlines()[1:]]
    assert listed == [
        ["anna", "-", "/", "^$", "^$", "a", "plant/%c/#,", "news", "plant/#"],
        ["anna", "-", "shop", ".*", ".*", ".*", "plant/%c/#,", "news", "plant/#"],
    ]
    assert users("permit", file, "anna", "--subscribe", "#").exit_code == 0
    said = Users.load(file).accounts["anna"].user
    assert (said.topics.publish, said.topics.subscribe) == ((), ("#",))
    assert list(said.permissions) == ["/", "shop"]
    assert '"subscribe": [' in users("list", file, "--json").stdout
    assert users("permit", file, "anna", "--vhost", "shop", "--none", "--no-topics").exit_code == 0
    assert users("permit", file, "anna", "--none").exit_code == 0
    assert file.read_text().replace('"/",\n    "shop"', '"/"') == before


def test_a_password_is_changed_and_nothing_else(file: Path) -> None:
    """The user keeps tags and permissions."""
    users("add", file, "anna", "--tag", "monitoring", stdin="secret")
    users("permit", file, "anna", "--all")
    before = Users.load(file).accounts["anna"]
    assert users("passwd", file, "anna", stdin=b"p\xff\r\n").exit_code == 0
    after = Users.load(file).accounts["anna"]
    assert after.user == before.user
    assert after.password.matches("p\udcff")
    assert not after.password.matches("secret")


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (("add", "anna"), "secret", "there is a user 'anna'"),
        (("add", "carl"), "", "must be the first line of stdin"),
        (("add", "carl"), "\n", "must be the first line of stdin"),
        (("add", "carl"), "x" * 5000, "of 1 to 4096 bytes"),
        (("add", "ca\nrl"), "secret", "the name of a user has 1 to 255 printable bytes"),
        (("add", "c" * 256), "secret", "the name of a user has 1 to 255 printable bytes"),
        (("add", "carl", "--tag", ""), "secret", "the name of a tag"),
        (("passwd", "carl"), "secret", "there is no user 'carl'; there are: anna"),
        (("remove", "carl"), "", "there is no user 'carl'; there are: anna"),
        (("permit", "carl", "--all"), "", "there is no user 'carl'; there are: anna"),
        (("permit", "anna"), "", "give --all, or --none"),
        (("permit", "anna", "--all", "--none"), "", "give --all, or --none"),
        (("permit", "anna", "--all", "--read", "a"), "", "give --all, or --none"),
        (("permit", "anna", "--publish", "a", "--no-topics"), "", "or one or more of --publish and --subscribe, or"),
        (("permit", "anna", "--all", "--subscribe", "a/#/b"), "", "topic filter 'a/#/b' goes on after '#'"),
        (("permit", "anna", "--read", "("), "", "'(' is no regular expression"),
        (("permit", "anna", "--all", "--vhost", ""), "", "the name of a virtual host"),
    ],
)
def test_what_is_wrong_is_said_and_leaves_the_file_as_it_is(
    file: Path, arguments: tuple[str, ...], stdin: str, said: str
) -> None:
    """With exit code 2."""
    users("add", file, "anna", stdin="secret")
    before = file.read_bytes()
    done = users(arguments[0], file, *arguments[1:], stdin=stdin)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.output
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", [("passwd", "anna"), ("remove", "anna"), ("permit", "anna", "--all"), ("list",)])
def test_only_add_makes_a_file(file: Path, command: tuple[str, ...]) -> None:
    """A misspelt path is an error."""
    done = users(command[0], file, *command[1:], stdin="secret")
    assert done.exit_code == 2
    assert "there is no users file" in done.stderr
    assert not file.exists()


def test_a_terminal_is_asked_twice_and_shows_nothing_of_the_password(cli: CommandLine) -> None:
    """Neither is stdout mixed with the questions."""
    ours, theirs = pty.openpty()
    process = cli.start_on(theirs, -1, "users", "add", "users.json", "anna", stderr=theirs)
    os.close(theirs)
    shown = b""
    for question in (b"Password: ", b"Repeat for confirmation: "):
        while question not in shown:
            shown += os.read(ours, 1000)
        os.write(ours, b"hidden\n")
    assert process.stdout is not None
    assert process.stdout.read().startswith(b"user anna is added")
    assert process.wait() == 0
    os.close(ours)
    assert b"hidden" not in shown
    assert Users.load(cli.directory / "users.json").accounts["anna"].password.matches("hidden")


def test_a_change_that_cannot_be_written_says_what_to_do(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the file as it is."""
    assert users("add", file, "anna", stdin="secret").exit_code == 0

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        done = users("add", file, "bob", stdin="other")
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1)
    assert f"cannot change the users file {str(file)!r}: No space left on device; it is as it was: mend" in done.stderr
    assert list(Users.load(file).accounts) == ["anna"]
