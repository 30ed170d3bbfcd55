"""Records of sessions and groups, many in a commit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from qflow.mqtt.errors import MqttError
from qflow.mqtt.server import keeping
from qflow.mqtt.server.keeping import Keeper


class Kept:
    """A session, or a group."""

    def __init__(self, name: str, is_group: bool) -> None:
        self.name = name
        self.is_group = is_group

    def as_fact(self) -> tuple[str, str, bytes]:
        return "room", self.name, b"record"

    def take_held(self) -> Any:
        return []

    def go_on(self, held: Any) -> None:
        assert held == []

    def fail(self, error: MqttError) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize(("most", "count"), [("MOST_AT_ONCE", 3), ("MOST_BYTES", 3 * len(b"record"))])
def test_a_group_is_written_with_the_sessions_of_its_members_or_after_them(
    monkeypatch: pytest.MonkeyPatch, most: str, count: int
) -> None:
    """However many there are, of whatever size: its record says what they were given.

    A thousand records with a hundred messages in flight each took 0.12 s at once, in each second.
    """
    commits: list[list[str]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def keep(_: object, rooms: dict[str, dict[str, bytes]]) -> asyncio.Future[None]:
            commits.append(list(rooms["room"]))
            done = loop.create_future()
            done.set_result(None)
            return done

        monkeypatch.setattr(keeping, "keep", keep)
        monkeypatch.setattr(keeping, most, count)
        keeper = Keeper(None)  # type: ignore[arg-type]
        for one in (Kept("group", True), *(Kept(f"session {number}", False) for number in range(4))):
            keeper.soon(one)
        while sum(map(len, commits)) < 5:
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert commits == [["session 0", "session 1", "session 2"], ["session 3", "group"]]
