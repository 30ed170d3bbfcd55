"""Logins: right and wrong passwords, and what a flood of wrong ones costs."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import MappingProxyType

import pytest

from doors.event_loop import run, turns, until
from qflow.serving import logins as module
from qflow.serving.logins import MOST_WAITING, Logins
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, User, Users

PEER, OTHER = "192.0.2.1", "192.0.2.2"
SECRET, CHANGED = PasswordHash.of("secret", n=2), PasswordHash.of("changed", n=2)


def users_of(password: PasswordHash = SECRET, names: tuple[str, ...] = ("anna", "bob")) -> Users:
    return Users(MappingProxyType({name: Account(User(name), password) for name in names}))


class Time:
    """A clock that runs while somebody sleeps, unless it stands still: many who sleep at once would add up."""

    def __init__(self, *, stands_still: bool = False) -> None:
        self.now_s = 1000.0
        self.stands_still = stands_still
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if not self.stands_still:
            self.now_s += seconds
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passwords that scrypt was given, which is cheap here, also for users that do not exist."""
    passwords: list[str] = []
    matches = PasswordHash.matches

    def counted(self: PasswordHash, password: str) -> bool:
        passwords.append(password)
        return matches(self, password)

    monkeypatch.setattr(PasswordHash, "matches", counted)
    monkeypatch.setattr(module, "_NOBODY", PasswordHash.of("nobody", n=2))
    return passwords


def logins_of(users: Users | None, time: Time | None = None) -> Logins:
    time = time or Time()
    return Logins(users, clock=time, sleep=time.sleep)


def test_the_right_password_lets_in_and_anything_else_does_not(checked: list[str]) -> None:
    """The user is the one of the file; a user that is not there costs what the others do."""

    async def scenario() -> None:
        logins = logins_of(users_of())
        anna = await logins.check("anna", "secret", PEER)
        assert anna == User("anna")
        assert await logins.check("anna", "wrong", PEER) is None
        assert await logins.check("carl", "secret", PEER) is None
        assert await logins.check("carl", "nobody", PEER) is None
        assert await logins.check("", "", PEER) is None
        logins.close()

    run(scenario())
    assert checked == ["secret", "wrong", "secret", "nobody", ""]


@pytest.mark.parametrize(
    ("name", "password", "peer", "comes_in"),
    [
        ("guest", "guest", "127.0.0.1", True),
        ("guest", "guest", "127.8.0.1", True),
        ("guest", "guest", "::1", True),
        ("guest", "guest", "::ffff:127.0.0.1", True),
        ("guest", "guest", "192.0.2.1", False),
        ("guest", "guest", "fe80::1%eth0", False),
        ("guest", "guest", "", False),
        ("guest", "", "127.0.0.1", False),
        ("anna", "guest", "127.0.0.1", False),
    ],
)
def test_without_a_users_file_guest_comes_in_from_this_machine(
    name: str, password: str, peer: str, comes_in: bool, checked: list[str]
) -> None:
    """Nobody else, and not from elsewhere, wherever the door listens."""

    async def scenario() -> User | None:
        return await logins_of(None).check(name, password, peer)

    user = run(scenario())
    assert (user is not None) is comes_in
    assert user is None or (user.is_administrator and user.may("write", "/", "q") and not user.may_enter("shop"))
    assert checked == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_login_has_the_rights_that_its_user_has_when_its_password_is_checked(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is let in with those of a file that was replaced meanwhile keeps them: nobody looks again."""
    begun, goes_on = threading.Event(), threading.Event()
    matches = PasswordHash.matches

    def late(password: PasswordHash, given: str) -> bool:
        begun.set()
        goes_on.wait()
        return matches(password, given)

    monkeypatch.setattr(PasswordHash, "matches", late)
    now = User("anna", frozenset({"now"}))

    async def scenario() -> User | None:
        logins = logins_of(users_of())
        login = asyncio.create_task(logins.check("anna", "secret", PEER))
        await until(begun.is_set)
        logins.users = Users(MappingProxyType({"anna": Account(now, SECRET)} if is_there else {}))
        goes_on.set()
        user = await login
        logins.close()
        return user

    assert run(scenario()) == (now if is_there else None)


def test_a_password_that_was_right_a_short_time_ago_is_not_checked_again(checked: list[str]) -> None:
    """For five minutes, from wherever; until the file has another one, or the user no more."""

    async def scenario() -> None:
        time = Time()
        logins = logins_of(users_of(), time)
        for peer in (PEER, OTHER, PEER):
            assert await logins.check("anna", "secret", peer)
        assert len(checked) == 1
        time.now_s += 301
        assert await logins.check("anna", "secret", PEER)
        assert len(checked) == 2
        logins.users = users_of(CHANGED)
        assert await logins.check("anna", "secret", PEER) is None
        assert await logins.check("anna", "changed", PEER)
        logins.users = users_of(CHANGED, ("bob",))
        assert await logins.check("anna", "changed", PEER) is None
        logins.close()

    run(scenario())


def test_many_who_come_at_once_with_the_same_password_share_one_check(checked: list[str]) -> None:
    """As the connections of one program do when it starts."""

    async def scenario() -> list[User | None]:
        logins = logins_of(users_of())
        found = await asyncio.gather(*(logins.check("anna", "secret", PEER) for _ in range(200)))
        logins.close()
        return found

    assert run(scenario()) == [User("anna")] * 200
    assert checked == ["secret"]


def test_a_login_tried_a_thousand_times_is_checked_once_and_slowed() -> None:
    """Each answer takes twice as long as the one before, up to four seconds."""

    async def scenario() -> list[float]:
        time = Time()
        logins = logins_of(users_of(), time)
        for _ in range(1000):
            assert await logins.check("anna", "wrong", PEER) is None
            time.slept = time.slept[-1000:]
        assert await logins.check("anna", "secret", OTHER)
        logins.close()
        return time.slept

    slept = run(scenario())
    assert slept[:7] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 4.0])
    assert max(slept) == 4.0


def test_a_thousand_passwords_at_once_are_checked_one_by_one_and_most_not_at_all(checked: list[str]) -> None:
    """Others, of another address, wait for none of them; neither does who was in before from the same one."""

    async def scenario() -> None:
        logins = logins_of(users_of(), time := Time(stands_still=True))
        assert await logins.check("bob", "secret", PEER)
        flood = [asyncio.create_task(logins.check("bob", f"guess {number}", PEER)) for number in range(1000)]
        await turns(1)
        slept = len(time.slept)
        assert await logins.check("bob", "secret", PEER)
        assert len(time.slept) == slept, "who was in before does not wait"
        assert await logins.check("anna", "secret", OTHER)
        assert await asyncio.gather(*flood) == [None] * 1000
        logins.close()

    run(scenario())
    guesses = [password for password in checked if password.startswith("guess")]
    assert len(guesses) == MOST_WAITING


def test_a_crowd_with_right_passwords_waits_for_its_checks_and_nobody_is_refused(checked: list[str]) -> None:
    """As the devices behind one gateway do, each with a name of its own, when a server has started again."""
    names = tuple(f"device {number}" for number in range(1000))

    async def scenario() -> list[User | None]:
        logins = logins_of(users_of(names=names), time := Time())
        found = await asyncio.gather(*(logins.check(name, "secret", PEER) for name in names))
        assert not time.slept
        logins.close()
        return found

    assert run(scenario()) == [User(name) for name in names]
    assert len(checked) == len(names)


def test_a_crowd_waits_beside_one_whose_password_is_wrong() -> None:
    """A device that was given the wrong one has the others refused no more than it has itself accepted."""
    names = tuple(f"device {number}" for number in range(1000))

    async def scenario() -> list[User | None]:
        logins = logins_of(users_of(names=names))
        wrong = asyncio.create_task(logins.check(names[0], "wrong", PEER))
        found = await asyncio.gather(*(logins.check(name, "secret", PEER) for name in names[1:]))
        assert await wrong is None
        logins.close()
        return found

    assert run(scenario()) == [User(name) for name in names[1:]]


def test_one_password_tried_with_a_thousand_names_is_checked_for_few_of_them(checked: list[str]) -> None:
    """After some wrong ones in a row those that wait are refused unchecked, but for as many as wait in any line."""
    names = tuple(f"name {number}" for number in range(1000))

    async def scenario() -> None:
        logins = logins_of(users_of(), Time(stands_still=True))
        assert await asyncio.gather(*(logins.check(name, "guess", PEER) for name in names)) == [None] * 1000
        assert not logins._checks
        logins.close()

    run(scenario())
    assert len(checked) <= module._LINES_OF_AN_ADDRESS * (module._IN_A_ROW + MOST_WAITING)


def test_who_fits_in_the_line_is_checked_whatever_crowd_comes_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some guesses come first, and then devices with right passwords: only those that do not fit in are refused."""
    monkeypatch.setattr(module, "_LINES_OF_AN_ADDRESS", 1)
    names = tuple(f"device {number}" for number in range(100))
    fitting = MOST_WAITING - module._IN_A_ROW

    async def scenario() -> list[User | None]:
        logins = logins_of(users_of(names=("anna", *names)), Time(stands_still=True))
        guesses = [logins.check("anna", f"guess {number}", PEER) for number in range(module._IN_A_ROW)]
        found = await asyncio.gather(*guesses, *(logins.check(name, "secret", PEER) for name in names))
        logins.close()
        return found[module._IN_A_ROW :]

    found = run(scenario())
    assert found[:fitting] == [User(name) for name in names[:fitting]]


def test_what_waits_of_a_crowd_is_bounded(monkeypatch: pytest.MonkeyPatch, checked: list[str]) -> None:
    """Above that, and where a name or password is long, as few wait in a line as of one name."""
    monkeypatch.setattr(module, "_MOST_CHECKS", 200)
    names = tuple(f"name {number}" for number in range(1000))
    most = module._LINES_OF_AN_ADDRESS * MOST_WAITING

    async def scenario(password: str) -> int:
        logins = logins_of(users_of(), Time(stands_still=True))
        tries = [asyncio.create_task(logins.check(name, password, PEER)) for name in names]
        await turns(1)
        waiting = len(logins._checks)
        await asyncio.gather(*tries)
        logins.close()
        return waiting

    assert most < run(scenario("guess")) <= 200 + most
    assert run(scenario("long" * 1000)) == most


def test_after_a_wrong_password_the_next_one_of_the_line_is_checked_later() -> None:
    """Three that come at once: each waits for its answer, and the second and third also for their checks."""

    async def scenario() -> list[float]:
        logins = logins_of(users_of(), time := Time(stands_still=True))
        await asyncio.gather(*(logins.check("anna", wrong, PEER) for wrong in ("one", "two", "three")))
        logins.close()
        return time.slept

    assert len(run(scenario())) == 3 + 2


def test_a_line_forgets_wrong_passwords_after_a_while_and_after_a_right_one() -> None:
    """A typing error of yesterday costs nothing today."""

    async def scenario() -> list[float]:
        time = Time()
        logins = logins_of(users_of(), time)
        for wrong in ("one", "two", "three"):
            await logins.check("anna", wrong, PEER)
        time.now_s += 61
        time.slept.clear()
        await logins.check("anna", "four", PEER)
        await logins.check("anna", "secret", PEER)
        await logins.check("anna", "five", PEER)
        logins.close()
        return time.slept

    assert run(scenario()) == pytest.approx([0.1, 0.1])


def test_an_attacker_with_many_addresses_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines and digests are as many as they may be; an IPv6 network of 2**64 addresses is one line."""
    monkeypatch.setattr(module, "_MOST_LINES", 8)
    monkeypatch.setattr(module, "_MOST_KNOWN", 8)

    async def scenario() -> Logins:
        logins = logins_of(users_of())
        for number in range(30):
            await logins.check("anna", f"guess {number}", f"192.0.2.{number}")
        for number in range(30):
            await logins.check("anna", "guess", f"2001:db8::{number:x}")
        logins.close()
        return logins

    logins = run(scenario())
    assert len(logins._lines) <= 8
    assert len(logins._wrong._until) <= 8
    assert [network for network, _ in logins._lines].count("20010db800000000") == 1


def test_a_client_that_leaves_during_a_check_does_not_free_its_place_before_the_check_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who connects, guesses and leaves at once has no more checks at a time than who waits."""
    begun: list[str] = []
    go_on = threading.Event()

    def matches(_self: PasswordHash, password: str) -> bool:
        begun.append(password)
        return not go_on.wait(60)

    async def scenario() -> None:
        logins = logins_of(users_of())
        for number in range(50):
            task = asyncio.create_task(logins.check("anna", f"guess {number}", PEER))
            await turns(3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert len(logins._checks) == MOST_WAITING
        go_on.set()
        await until(lambda: not logins._checks)
        logins.close()

    monkeypatch.setattr(PasswordHash, "matches", matches)
    run(scenario())
    assert len(begun) == MOST_WAITING


def test_the_log_has_one_line_for_many_refused_logins(caplog: pytest.LogCaptureFixture) -> None:
    """The next line says how many there were; what the client says cannot make lines of its own."""
    name = "an\nna" + "a" * 100

    async def scenario() -> None:
        time = Time()
        logins = Logins(None, clock=time, sleep=lambda _: asyncio.sleep(0))
        for _ in range(1000):
            await logins.check(name, "wrong", PEER)
        time.now_s += 11
        await logins.check("anna", "wrong", PEER)
        logins.close()

    with caplog.at_level(logging.WARNING, "qflow"):
        run(scenario())
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"a login as {name[:64]!r} from {PEER} was refused"
    assert second == f"a login as 'anna' from {PEER} was refused, and 999 more since the last line"
