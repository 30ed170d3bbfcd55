"""`qflow sessions`: what sleeps, what is there, how far behind it is, and how one is deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import mqtt_served
import qflow
from doors.command_line import CommandLine, error_line
from doors.event_loop import run
from mqtt_loop import DISCONNECT, SetClock, client, cut_all, dialled, serving, serving_at, slept, unconnected
from qflow.cli.sessions import _span
from qflow.storage.log.facts import fact_key

NEVER_S = 2**32 - 1


async def asleep(server: Any, client_id: str, *filters: str, expiry_s: int = NEVER_S, **given: Any) -> None:
    """Leave a session that sleeps."""
    raw = await client(server, client_id, SessionExpiryInterval=expiry_s)
    for topic_filter in filters:
        await raw.subscribe(topic_filter, **given)
    await raw.disconnect()


def listed(cli: CommandLine, *arguments: object) -> dict[str, Any]:
    """Return the sessions by their client ids."""
    return {one["client_id"]: one for one in cli.json("sessions", cli.spool, *arguments)["sessions"]}


def table(cli: CommandLine, *arguments: object) -> list[list[str]]:
    done = cli.run("sessions", *arguments, cli.spool)
    assert (done.returncode, done.stderr) == (0, b"")
    return [line.split() for line in done.stdout.decode().splitlines()]


def some_sessions(spool: Path) -> None:
    """Two that sleep, one of them with messages on their way; a group; two retained messages."""

    async def scenario() -> None:
        async with serving(spool) as server:
            await asleep(server, "valve", "plant/+/heat", "news", expiry_s=7200)
            await asleep(server, "pump-1", "$share/workers/jobs/#")
            source = await client(server, "source")
            for number in range(3):
                await source.published("plant/1/heat", b"%d" % number, packet_id=number + 1)
            await source.published("jobs/1", retain=True)
            await source.published("jobs/2", retain=True)
            valve = await client(server, "valve", clean=False, SessionExpiryInterval=7200)
            for _ in range(3):
                await valve.message(ack=False)
            await valve.cut()
            await slept(server, 1)
            for number in range(2):
                await source.published("plant/1/heat", b"%d" % number, packet_id=number + 1)

    run(scenario())


def test_sessions_that_sleep_are_listed(cli: CommandLine) -> None:
    """With what is on its way to each, how many messages there are behind that, groups, and what is retained."""
    some_sessions(cli.spool)
    found = cli.json("sessions", cli.spool)
    pump, valve = found["sessions"]
    assert (valve["client_id"], valve["connected"], valve["expiry_s"]) == ("valve", False, 7200)
    assert valve["expires_ms"] == valve["left_ms"] + 7_200_000
    assert (valve["unacknowledged"], valve["behind_messages"], valve["lost_messages"]) == (3, 2, 0)
    assert valve["subscriptions"][0] == {
        "name": "plant/+/heat", "filter": "plant/+/heat", "group": None, "qos": 1, "offset": 5,
    }  # fmt: skip
    assert (pump["client_id"], pump["expiry_s"], pump["expires_ms"]) == ("pump-1", None, None)
    assert (pump["subscriptions"][0]["group"], pump["subscriptions"][0]["offset"]) == ("workers", None)
    (group,) = found["groups"]
    assert (group["group"], group["filter"], group["members"]) == ("workers", "jobs/#", ["pump-1"])
    assert group["behind_messages"] == 7 - group["offset"] == 7
    assert {one["waiting_messages"] for one in (valve, group)} == {None}
    assert (found["stream"], found["next_offset"], found["retained_messages"]) == ("mqtt", 7, 2)
    rows = table(cli)
    assert rows[0] == ["client", "gone", "expires", "filters", "unacked", "unreleased", "waiting"]
    assert [row[0] for row in rows[1:3]] == ["pump-1", "valve"]
    assert rows[1][-5:] == ["never", "1", "0", "0", "0"]
    assert rows[2][2:4] == ["in", "1h"]
    assert rows[2][-6:] == ["2", "3", "0", "at", "most", "2"]
    assert rows[5] == ["workers", "jobs/#", "1", "0", "at", "most", "7"]
    assert rows[-1][:3] == ["2", "retained", "messages,"]


def test_what_waits_is_counted_by_filters_if_that_is_asked_for(cli: CommandLine) -> None:
    """Of a session with several filters, and of a group; one whose places are the present has none to count."""
    some_sessions(cli.spool)
    found = cli.json("sessions", cli.spool, "--exact")
    pump, valve = found["sessions"]
    (group,) = found["groups"]
    counted = [(one["waiting_messages"], one["waiting_is_exact"]) for one in (pump, valve, group)]
    assert counted == [(0, True), (2, True), (2, True)]
    rows = table(cli, "--exact")
    assert [rows[2][-1], rows[5][-1]] == ["2", "2"]
    assert "at" not in rows[2] + rows[5]


def test_beside_a_server_those_who_are_there_are_listed_too(cli: CommandLine) -> None:
    """How far they are, only the server knows; when it is killed, they go on where their records say."""

    async def scenario() -> None:
        async with serving(cli.spool) as server:
            there = await client(server, "there", SessionExpiryInterval=60)
            await there.subscribe("#")
            await there.nothing()
            found = (await asyncio.to_thread(listed, cli))["there"]
            assert (found["connected"], found["left_ms"], found["behind_messages"]) == (True, None, None)
            rows = await asyncio.to_thread(table, cli)
            assert rows[1] == ["there", "no", "1m", "after", "it", "goes", "1", "0", "0", "-"]

    run(scenario())


def test_a_session_whose_client_was_there_at_a_kill_ends_after_the_next_start(cli: CommandLine) -> None:
    """Nobody is there to go any more; from that start on its time runs."""
    with mqtt_served.serving(cli.directory, "--mqtt", "127.0.0.1:0") as (process, ports):

        async def scenario() -> None:
            raw = await dialled(ports["mqtt"][0])
            await raw.connect("there", SessionExpiryInterval=60)
            process.kill()
            await cut_all()

        run(scenario())
        process.wait()
        assert table(cli)[1][:7] == ["there", "no", "1m", "after", "a", "start", "0"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_is_told_as_lost_does_not_come(cli: CommandLine, is_restarted: bool) -> None:
    """Of a session that slept too long, also while the server still has those messages in its memory."""
    with qflow.open(cli.spool) as broker:
        broker.declare_stream("mqtt", topics=["#"], retention_messages=10)

    async def left() -> None:
        async with serving(cli.spool) as server:
            await asleep(server, "valve", "#")
            for number in range(50):
                await server.broker.publish(f"t/{number}", b"%d" % number)
            while (await server.broker.stream("mqtt").stats()).first_offsets[0] < 40:
                await asyncio.sleep(0)
            if not is_restarted:
                await check(server)

    async def check(server: Any) -> None:
        found = (await asyncio.to_thread(listed, cli))["valve"]
        assert (found["lost_messages"], found["behind_messages"]) == (40, 10)
        valve = await client(server, "valve", clean=False, SessionExpiryInterval=60)
        assert await valve.messages(10) == [b"%d" % number for number in range(40, 50)]
        await valve.nothing()
        assert server.house.hub.counts.lost == 40

    async def again() -> None:
        async with serving(cli.spool) as server:
            await check(server)

    run(left())
    if is_restarted:
        found = listed(cli)["valve"]
        assert (found["lost_messages"], found["behind_messages"]) == (40, 10)
        run(again())


def test_a_server_gives_sessions_an_end(cli: CommandLine) -> None:
    """Of 3.1.1, too."""
    options = ("--mqtt", "127.0.0.1:0", "--mqtt-session-expiry", "7200", "--mqtt-max-keep-alive", "60")
    with mqtt_served.serving(cli.directory, *options) as (_, ports):

        async def scenario() -> None:
            for version, told in ((4, {}), (5, {"SessionExpiryInterval": 7200, "ServerKeepAlive": 60})):
                raw = await dialled(ports["mqtt"][0], version)
                wish = {"SessionExpiryInterval": NEVER_S} if version == 5 else {}
                connack = await raw.connect(f"c{version}", clean=False, **wish)
                assert told.items() <= connack.properties.items()
                await raw.disconnect()

        run(scenario())
        while {one["left_ms"] for one in listed(cli).values()} & {None}:
            pass
        assert {name: one["expiry_s"] for name, one in listed(cli).items()} == {"c4": 7200, "c5": 7200}
    for wrong in (("--mqtt-session-expiry", 0), ("--mqtt-max-keep-alive", 65_536)):
        assert cli.run("serve", cli.spool, "--mqtt", "127.0.0.1:0", *wrong).returncode == 2
    alone = cli.run("serve", cli.spool, "--mqtt", "127.0.0.1:0", "--mqtt-redirect-permanent")
    assert (alone.returncode, b"give that, too" in alone.stderr) == (2, True)
    done = cli.run("serve", cli.spool, "--amqp", "127.0.0.1:0", "--mqtt-session-expiry", 60)
    assert done.returncode == 2
    assert b"--mqtt-session-expiry and --mqtt-redirect go with --mqtt" in done.stderr


def test_client_ids_are_shown_as_what_they_are(cli: CommandLine) -> None:
    """One that would clear the terminal is quoted; a pattern chooses among them."""
    hostile = "a\x1b[2J b"

    async def scenario() -> None:
        async with serving(cli.spool) as server:
            for client_id in (hostile, "valve-1", "valve-2", "v[1]"):
                await asleep(server, client_id)

    run(scenario())
    done = cli.run("sessions", cli.spool)
    assert b"\x1b" not in done.stdout
    assert ascii(hostile).encode() in done.stdout
    assert list(listed(cli, "--filter", "valve-*")) == ["valve-1", "valve-2"]
    assert list(listed(cli, "--filter", "v[1]")) == ["v[1]"]
    assert listed(cli, "--filter", "valve") == {}
    assert hostile in listed(cli)


def test_a_session_whose_time_is_over_is_shown_as_such(cli: CommandLine) -> None:
    """It ends when a server looks at it."""

    async def scenario() -> None:
        clock = SetClock()
        clock.now_s = 1_000_000_000.0
        async with serving_at(clock, cli.spool) as server:
            await asleep(server, "old", expiry_s=10)

    run(scenario())
    assert table(cli, "--filter", "old")[1][2:4] == ["is", "over"]


def test_a_session_is_deleted_with_all_there_is_of_it(cli: CommandLine) -> None:
    """It is no member of its groups any more, and the last one takes the group with it; the others stay."""
    some_sessions(cli.spool)
    done = cli.run("sessions", "delete", cli.spool, "pump-1", "--yes")
    assert (done.returncode, done.stdout) == (0, b"the session of pump-1 is deleted\n")
    found = cli.json("sessions", cli.spool)
    assert [one["client_id"] for one in found["sessions"]] == ["valve"]
    assert found["groups"] == []
    again = cli.run("sessions", "delete", cli.spool, "pump-1", "--yes")
    assert again.returncode == 2
    assert "no session of the client 'pump-1'" in error_line(again)

    async def scenario() -> None:
        async with serving(cli.spool) as server:
            pump = await client(server, "pump-1", clean=False, SessionExpiryInterval=60)
            await pump.nothing()
            valve = await client(server, "valve", clean=False, SessionExpiryInterval=60)
            assert await valve.messages(5) == [b"0", b"1", b"2", b"0", b"1"]

    run(scenario())


@pytest.mark.parametrize("version", [5, 4])
def test_beside_a_server_a_session_whose_client_is_there_is_deleted(cli: CommandLine, version: int) -> None:
    """The client is told, its will is published, and it begins anew; without a yes, and for a try, nothing happens."""

    async def deleted(*given: str) -> Any:
        return await asyncio.to_thread(cli.run, "sessions", "delete", cli.spool, *given)

    async def scenario() -> None:
        async with serving(cli.spool) as server:
            lasts: dict[str, Any] = {"SessionExpiryInterval": 60} if version == 5 else {}
            will = {"topic": "wills/there", "payload": b"gone", "qos": 1}
            watch = await client(server, "watch")
            await watch.subscribe("wills/#")
            there = await client(server, "there", version=version, clean=False, will=will, **lasts)
            await there.subscribe("a")
            tried = await deleted("there", "--dry-run")
            expected = (
                "would delete the session of there, with 1 subscription, and close its client, which is connected"
            )
            assert tried.stdout.decode().strip() == expected
            refused = await deleted("there")
            assert (refused.returncode, b"give --yes" in refused.stderr) == (2, True)
            await there.nothing()
            done = await deleted("there", "--yes")
            assert (done.returncode, done.stderr) == (0, b"")
            told = await there.gone()
            assert [(one.kind, one.code) for one in told] == ([(DISCONNECT, 0x98)] if version == 5 else [])
            assert await watch.messages(1) == [b"gone"]
            assert await asyncio.to_thread(listed, cli) == {}
            again = await unconnected(server, version=version)
            assert not (await again.connect("there", clean=False, **lasts)).present

    run(scenario())


def test_beside_a_server_a_session_that_sleeps_is_deleted(cli: CommandLine) -> None:
    """With its will, which is published then, and its place in its groups, of which one is there; another is not."""

    async def deleted(client_id: str) -> Any:
        return await asyncio.to_thread(cli.run, "sessions", "delete", cli.spool, client_id, "--yes")

    async def scenario() -> None:
        async with serving(cli.spool) as server:
            watch = await client(server, "watch", SessionExpiryInterval=60)
            await watch.subscribe("$share/workers/jobs/#", "wills/#")
            delayed = {"topic": "wills/valve", "payload": b"gone", "qos": 1, "properties": {"WillDelayInterval": 50}}
            valve = await client(server, "valve", SessionExpiryInterval=60, will=delayed)
            await valve.subscribe("$share/workers/jobs/#", "$share/others/jobs/#", "a")
            await valve.cut()
            await slept(server, 1)
            assert (await deleted("valve")).returncode == 0
            assert await watch.messages(1) == [b"gone"]
            found = await asyncio.to_thread(cli.json, "sessions", cli.spool)
            assert [one["client_id"] for one in found["sessions"]] == ["watch"]
            assert [(one["group"], one["members"]) for one in found["groups"]] == [("workers", ["watch"])]
            missing = await deleted("valve")
            assert missing.returncode == 2
            assert "no session of the client 'valve'" in error_line(missing)

    run(scenario())


def test_an_owner_without_a_server_deletes_a_session_through_its_door(cli: CommandLine) -> None:
    """It need not have imported MQTT for that."""
    some_sessions(cli.spool)
    with qflow.open(cli.spool):
        assert cli.run("sessions", "delete", cli.spool, "valve", "--yes").returncode == 0
        assert list(listed(cli)) == ["pump-1"]


def test_a_packet_that_is_not_released_belongs_to_its_session(cli: CommandLine) -> None:
    """It is counted, and forgotten with it."""

    async def scenario() -> None:
        async with serving(cli.spool) as server:
            raw = await client(server, "half", SessionExpiryInterval=60)
            raw.publish("t", qos=2, packet_id=9)
            await raw.expect(5)
            await raw.cut()
            await slept(server)

    run(scenario())
    assert listed(cli)["half"]["unreleased"] == 1
    assert cli.run("sessions", "delete", cli.spool, "half", "--yes").returncode == 0
    assert listed(cli) == {}

    async def anew() -> None:
        async with serving(cli.spool) as server:
            raw = await client(server, "half", clean=False, SessionExpiryInterval=60)
            await raw.disconnect()

    run(anew())
    assert listed(cli)["half"]["unreleased"] == 0


def test_a_damaged_record_is_told_and_can_be_deleted(cli: CommandLine) -> None:
    """It hides no other, and its client comes in again when it is gone."""
    some_sessions(cli.spool)
    with qflow.open(cli.spool) as broker:
        log = broker.engine.log
        place = fact_key("mqtt.sessions", "valve")

        def damage(txn: Any) -> None:
            value = bytearray(txn.get(place))
            value[-6] ^= 1
            txn.put(place, bytes(value))

        log.commit(log.write(damage))
    done = cli.run("sessions", cli.spool)
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith("problem: the fact 'valve' of 'mqtt.sessions' does not match its checksum")
    assert [line.split()[0] for line in lines[1:3]] == ["client", "pump-1"]
    assert cli.run("sessions", "delete", cli.spool, "valve", "--yes").returncode == 0
    assert list(listed(cli)) == ["pump-1"]

    async def scenario() -> None:
        async with serving(cli.spool) as server:
            valve = await client(server, "valve", clean=False, SessionExpiryInterval=60)
            await valve.nothing()

    run(scenario())


def test_a_spool_without_mqtt_has_none(cli: CommandLine) -> None:
    """A stream that is named, and is not there, is an error; so is a spool that is not there."""
    cli.run("put", cli.spool, "q", stdin=b"line\n")
    assert table(cli)[0] == ["no", "sessions"]
    assert cli.json("sessions", cli.spool)["next_offset"] is None
    done = cli.run("sessions", cli.spool, "--stream", "plants")
    assert done.returncode == 2
    assert "'plants'" in error_line(done)
    assert cli.run("sessions", cli.spool / "not").returncode == 2
    assert not (cli.spool / "not").exists()
    assert b"[list] SPOOL" in cli.run("sessions", "--help").stdout


@pytest.mark.parametrize(("seconds", "shown"), [(-3, "0s"), (0.9, "0s"), (59, "59s"), (3599, "59m"), (90_000, "1d")])
def test_times_are_short(seconds: float, shown: str) -> None:
    assert _span(seconds) == shown
