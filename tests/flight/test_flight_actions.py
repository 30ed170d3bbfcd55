"""Actions: what there is, the arithmetic of planners, and groups of readers with their leases."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pf = pytest.importorskip("pyarrow.flight")

import qflow  # noqa: E402
import qflow.flight  # noqa: E402
from flight.test_flight_reading import fill, refused  # noqa: E402
from qflow.arrow import ranges  # noqa: E402
from qflow.flight import owner  # noqa: E402
from qflow.flight.leases import Leases  # noqa: E402
from qflow.flight.owner import Owner  # noqa: E402
from qflow.storage.files import Files  # noqa: E402
from qflow.storage.streams.groups import Group, Held, committed_of  # noqa: E402


def test_a_spool_is_described(broker: qflow.Broker, client: Any, act: Any) -> None:
    """The log, streams with their bounds, queues; actions are listed with what they are for."""
    fill(broker)
    found = act("describe")
    assert found["uuid"] == str(broker.uuid)
    (stream,) = found["streams"]
    assert stream["name"] == "plants"
    assert stream["settings"]["topics"] == ["plant/#"]
    assert sum(part["messages"] for part in stream["partitions"]) == 100
    assert [part["end"] for part in stream["partitions"]] == broker.stream("plants").stats().next_offsets
    assert [queue["name"] for queue in found["queues"]] == ["jobs"]
    assert "describe" in {action.type for action in client.list_actions()}


def test_who_asks_for_a_stream_has_nobody_look_at_queues(
    broker: qflow.Broker, client: Any, act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ticket, and each action of a plan, read the rows of all there are: a second, where there are five thousand."""
    fill(broker)
    (known,) = act("describe")["streams"]
    monkeypatch.setattr(owner, "state_of", Mock(side_effect=AssertionError))
    number, end = known["number"], known["partitions"][0]["end"]
    act("resolve", bound={"kind": "latest"}, streams=["plants"])
    act("cut", ranges=[[number, 0, 0, end]], cutting={})
    act("offset_after", asked=[[number, 0, 0, end, 1]])
    act("commit_positions", group="g", token=act("lease", group="g")["token"], offsets={number: {0: end}})
    (info,) = client.list_flights()
    assert client.get_flight_info(pf.FlightDescriptor.for_path("plants")).total_records == info.total_records == 100
    assert sum(client.do_get(endpoint.ticket).read_all().num_rows for endpoint in info.endpoints) == 100


def test_bounds_are_resolved_and_ranges_cut_beside_the_log(broker: qflow.Broker, act: Any) -> None:
    """As a planner beside the log would."""
    fill(broker)
    ends = broker.stream("plants").stats().next_offsets
    number = act("describe")["streams"][0]["number"]
    latest = act("resolve", bound={"kind": "latest"}, streams=["plants"])["offsets"]
    assert latest == {"plants": {"0": ends[0], "1": ends[1]}}
    chosen = act("resolve", bound={"kind": "earliest"}, streams=["plants"], assigned={"plants": [1]})["offsets"]
    assert chosen == {"plants": {"1": 0}}
    ranges = [[number, 0, 0, ends[0]], [number, 1, 0, ends[1]]]
    spans = act("cut", ranges=ranges, cutting={"most_messages": 10})["spans"]
    assert {tuple(span[:2]) for span in spans} == {("plants", number)}
    assert [sum(span[4] - span[3] for span in spans if span[2] == part) for part in (0, 1)] == ends
    assert max(span[4] - span[3] for span in spans) == 10
    (after,) = act("offset_after", asked=[[number, 0, 0, ends[0], 1]])["offsets"]
    assert 0 < after <= ends[0]
    eras = act("eras", offsets={str(number): {"0": ends[0]}})["eras"][str(number)]
    asked = {"number": number, "offsets": {"0": ends[0]}}
    assert act("other_era", known=eras, **asked)["partition"] is None
    assert act("other_era", known={"0": "0" * 16}, **asked)["partition"] == 0


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (0, 2**62), (2**62, 0), (2**70, 2**71), (0, 101)])
def test_ranges_that_are_not_in_the_stream_are_refused(broker: qflow.Broker, act: Any, start: int, end: int) -> None:
    """None is cut, nor looked through for so many bytes."""
    broker.declare_stream("logs", topics=["log/#"])
    broker.publish_many(("log/a", b"x") for _ in range(100))
    number = next(one["number"] for one in act("describe")["streams"] if one["name"] == "logs")
    text = f"has offsets from 0 to its end 100: a range from {start} to {end} is not in it"
    assert text in str(refused(lambda: act("offset_after", asked=[[number, 0, start, end, 1]])))
    assert text in str(refused(lambda: act("cut", ranges=[[number, 0, start, end]], cutting={"most_messages": 2**61})))
    assert act("cut", ranges=[[number, 0, 50, 5]], cutting={})["spans"] == []


def test_a_partition_is_looked_through_once(broker: qflow.Broker, act: Any) -> None:
    """However often it is named."""
    broker.declare_stream("logs", topics=["log/#"])
    broker.publish_many(("log/a", b"x") for _ in range(100))
    number = next(one["number"] for one in act("describe")["streams"] if one["name"] == "logs")
    twice = [[number, 0, 0, 100, 1], [number, 0, 0, 50, 1]]
    assert "names a partition twice" in str(refused(lambda: act("offset_after", asked=twice)))


@pytest.mark.parametrize("cutting", [{"most_messages": 1}, {"least": 2**62}])
def test_a_cut_into_too_many_parts_is_refused(
    broker: qflow.Broker, act: Any, monkeypatch: pytest.MonkeyPatch, cutting: dict[str, int]
) -> None:
    """Before any of them is made."""
    monkeypatch.setattr(ranges, "MOST_SPANS", 50)
    fill(broker)
    ends = broker.stream("plants").stats().next_offsets
    number = act("describe")["streams"][0]["number"]
    asked = [[number, part, 0, ends[part]] for part in (0, 1)]
    error = refused(lambda: act("cut", ranges=asked, cutting=cutting))
    assert isinstance(error, qflow.InvalidArgument)
    assert "100 messages would be cut into 100 parts, and 50 are the most" in str(error)
    assert len(act("cut", ranges=asked, cutting={"least": 50})["spans"]) <= 50


def test_a_cut_that_looks_for_no_blocks_keeps_no_one_from_the_log(broker: qflow.Broker) -> None:
    """Only blocks are looked for in a transaction."""
    fill(broker)
    stream = Owner(broker).state().streams["plants"]
    asked = [(stream, number, *stream.bounds(number)) for number in (0, 1)]
    for cutting in (ranges.Cutting(1, 4), ranges.Cutting(1, None, 10), ranges.Cutting(2)):
        spans = ranges.cut(lambda: pytest.fail("a transaction"), asked, cutting)
        assert sum(span.end - span.start for span in spans) == 100


class Counted(int):
    """A number that counts how often one like it is added to something."""

    added = 0

    def __sub__(self, other: int) -> Counted:
        return Counted(int(self) - int(other))

    def __radd__(self, other: int) -> int:
        Counted.added += 1
        return int(self) + other


def test_many_ranges_are_gone_through_once_for_the_number_of_tasks(broker: qflow.Broker) -> None:
    """A client may ask for a hundred thousand: their sum was made anew for each of them."""
    fill(broker)
    stream = Owner(broker).state().streams["plants"]
    asked = [(stream, 0, number, Counted(number + 1)) for number in range(50)]
    assert len(ranges.cut(lambda: pytest.fail("a transaction"), asked, ranges.Cutting(1, least=20))) == 50
    assert 0 < Counted.added <= 100


def test_topics_have_takers(broker: qflow.Broker, act: Any) -> None:
    """A sink asks before it writes."""
    found = act("takers", topics=["plant/1"])
    assert [taker[:2] for taker in found["takers"]] == [["stream", "plants"]]
    assert found["rooms"]["plant/1"] > 0
    assert "takes topic 'nowhere'" in str(refused(lambda: act("takers", topics=["nowhere"])))
    broker.declare_stream("all", topics=["#"])
    of_amqp = refused(lambda: act("takers", topics=["amqp-stream/x"], stream="all"))
    assert "'all' of" in str(of_amqp), "as a publish finds it"


def test_a_group_has_one_reader(broker: qflow.Broker, act: Any) -> None:
    """Who holds the lease commits positions; another one waits until it is given back."""
    fill(broker)
    number = str(act("describe")["streams"][0]["number"])
    token = act("lease", group="g", seconds=60)["token"]
    assert isinstance(refused(lambda: act("lease", group="g")), qflow.GroupInUse)
    act("commit_positions", group="g", token=token, offsets={number: {"0": 5}})
    assert act("positions", group="g")["offsets"] == {number: {"0": 5}}
    assert act("lease", group="g", token=token)["offsets"] == {number: {"0": 5}}
    act("release", group="g", token=token)
    assert isinstance(refused(lambda: act("commit_positions", group="g", token=token, offsets={})), qflow.GroupInUse)
    after = act("lease", group="g")
    assert after["token"] > token
    assert after["offsets"] == {number: {"0": 5}}


def test_a_group_says_where_it_is_in_streams_that_are_there(broker: qflow.Broker, act: Any) -> None:
    """Or were there: from any other place, retention would keep nothing for it."""
    fill(broker)
    (end, _) = broker.stream("plants").stats().next_offsets
    broker.declare_stream("gone", topics=["gone"])
    described = act("describe")
    plants, gone = (one["number"] for one in sorted(described["streams"], key=lambda one: -len(one["name"])))
    broker.delete_stream("gone")
    jobs = described["queues"][0]["number"]
    token = act("lease", group="g")["token"]
    for offsets, kind, text in (
        ({plants: {0: -5}}, qflow.InvalidArgument, "an offset from 0 on, not 0 and -5"),
        ({plants: {0: 2**70}}, qflow.InvalidArgument, "an offset from 0 on"),
        (
            {plants: {0: end + 1}},
            qflow.InvalidArgument,
            f"offset {end + 1} of stream 'plants', partition 0, is past its end",
        ),
        ({plants: {7: 1}}, qflow.NotFound, "no partition 7"),
        ({jobs: {0: 1}}, qflow.NotFound, f"stream with number {jobs}"),
        ({10**6: {0: 1}}, qflow.NotFound, "stream with number 1000000"),
        ({plants: {"x": 1}}, qflow.InvalidArgument, "must be whole numbers by partition"),
    ):
        error = refused(lambda offsets=offsets: act("commit_positions", group="g", token=token, offsets=offsets))
        assert type(error) is kind
        assert text in str(error)
    with pytest.raises(pf.FlightError) as caught:
        act("commit_positions", group="g", token=token, offsets={plants: {0: "1"}})
    assert str(caught.value).count("'offsets' of action 'commit_positions'") == 1
    assert act("positions", group="g")["offsets"] == {}
    act("commit_positions", group="g", token=token, offsets={plants: {0: end, 1: 0}, gone: {0: 3}})
    assert act("positions", group="g")["offsets"][str(plants)] == {"0": end, "1": 0}


def test_nothing_is_told_of_a_broker_that_was_closed(broker: qflow.Broker, client: Any, act: Any) -> None:
    """Nor kept for it: another owner may have the spool."""
    broker.close()
    for name in ("describe", "lease", "positions"):
        assert isinstance(refused(lambda name=name: act(name, group="g")), qflow.BrokerClosed)
    assert isinstance(refused(lambda: list(client.list_flights())), qflow.BrokerClosed)


def test_a_late_holder_of_an_old_lease_is_refused(broker: qflow.Broker) -> None:
    """Also after the owner was gone; who comes late and was not replaced goes on."""
    now = [0.0]
    leases = Leases(broker.path, str(broker.uuid), lambda: now[0])
    old = leases.take("g", None, 10.0).token
    now[0] = 11.0
    leases.acknowledge("g", old, {3: {0: 1}}, 10.0)  # late, and nobody has taken it
    now[0] = 22.0
    new = leases.take("g", None, 10.0)
    assert new.token > old
    assert new.offsets == {3: {0: 1}}
    for late in (
        lambda: leases.acknowledge("g", old, {3: {0: 9}}, 10.0),
        lambda: leases.take("g", old, 10.0),
    ):
        with pytest.raises(qflow.GroupInUse, match=f"with token {old} has ended"):
            late()
    leases.close()
    again = Leases(broker.path, str(broker.uuid), lambda: now[0])
    with pytest.raises(qflow.GroupInUse, match=f"with token {old} has ended"):
        again.acknowledge("g", old, {3: {0: 9}}, 10.0)
    again.acknowledge("g", new.token, {3: {0: 2}}, 10.0)
    assert again.take("g", new.token, 10.0).offsets == {3: {0: 2}}
    again.close()


def test_a_lease_that_is_over_lets_readers_beside_the_owner_in(broker: qflow.Broker) -> None:
    """To them, a lease is the lock of the group."""
    now = [0.0]
    leases = Leases(broker.path, str(broker.uuid), lambda: now[0])
    leases.take("g", None, 10.0)
    with pytest.raises(qflow.GroupInUse):
        Group(broker.path, "g", str(broker.uuid), Files())
    now[0] = 11.0
    leases.sweep()
    Group(broker.path, "g", str(broker.uuid), Files()).close()
    leases.close()


def test_a_lease_that_is_renewed_has_its_group_seen(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that retention waits for a reader that found nothing to read for long; a full disk ends no lease."""
    day = 86_400.0
    now = [day]
    leases = Leases(broker.path, str(broker.uuid), lambda: now[0], lambda: now[0])
    held = Held(broker.path, str(broker.uuid), lambda: now[0])
    token = leases.take("g", None, day).token
    leases.acknowledge("g", token, {3: {0: 1}}, 3 * day)
    for _ in range(7):
        now[0] += 2 * day
        assert leases.take("g", token, 3 * day).token == token
    with monkeypatch.context() as patched:
        patched.setattr(Files, "rename", full)
        now[0] += day
        leases.take("g", token, 3 * day)
    now[0] += day
    leases.sweep()
    with pytest.raises(qflow.GroupInUse):
        leases.take("g", None, day)
    leases.close()
    assert held(3) == {0: 1}
    now[0] += 6 * day
    assert held(3) == {}


def full(*_: object) -> None:
    """A disk without room."""
    raise OSError(28, "No space left on device")


def test_leases_of_a_spool_that_is_moved_go_on_where_it_is(tmp_path: Path) -> None:
    """Those that were given, and new ones."""
    with qflow.open(tmp_path / "spool") as broker:
        leases = Leases(broker.engine.spool.place, str(broker.uuid))
        token = leases.take("g", None, 10.0).token
        (tmp_path / "spool").rename(tmp_path / "moved")
        leases.acknowledge("g", token, {3: {0: 1}}, 10.0)
        assert leases.take("h", None, 10.0).token
        leases.close()
        assert committed_of(str(tmp_path / "moved"), "g", str(broker.uuid)) == {3: {0: 1}}


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("explode", {}, "does not know the action 'explode'"),
        ("describe", {"uuid": "another"}, "was made anew"),
        ("resolve", {"bound": {"kind": "soon"}, "streams": ["plants"]}, "'kind' of 'bound'"),
        ("resolve", {"bound": {"kind": "latest"}, "streams": ["none"]}, "there is no stream 'none'"),
        ("cut", {"ranges": [[1, 2]]}, "must be a list of [int, int, int, int]"),
        ("cut", {"ranges": [[99, 0, 0, 1]]}, "stream with number 99"),
        ("lease", {}, "'group' of action 'lease' must be a text"),
        ("lease", {"group": "g", "seconds": -1}, "'seconds'"),
        ("lease", {"group": "g", "seconds": 10**400}, "'seconds' of action 'lease' must be above 0"),
        ("lease", {"group": ""}, "is empty"),
        ("lease", {"group": "\ud800"}, "'group' of action 'lease' must be a text of UTF-8"),
        ("positions", {"group": "\ud800"}, "'group' of action 'positions' must be a text of UTF-8"),
        ("takers", {"topics": ["\ud800"]}, "a text of 'topics' of action 'takers' must be a text of UTF-8"),
        ("commit_positions", {"group": "g", "token": 1, "offsets": [1]}, "'offsets'"),
        ("commit_positions", {"group": "g", "token": 1, "offsets": {"a": {}}}, "is by the number of a stream, not 'a'"),
        ("commit_positions", {"group": "g", "token": 1, "offsets": {"-1": {}}}, "is by the number of a stream"),
        ("commit_positions", {"group": "g", "token": 1, "offsets": {"9" * 10: {}}}, "is by the number of a stream"),
        ("eras", {"offsets": {"1": {"0": -1}}}, "an offset from 0 on, not 0 and -1"),
        ("eras", {"offsets": {"1": {"0": 2**63}}}, "an offset from 0 on"),
        ("eras", {"offsets": {"1": {"300": 5}}}, "a number from 0 to 63"),
        ("eras", {"offsets": {"1": 5}}, "must be whole numbers by partition"),
        ("other_era", {"number": 1, "offsets": {"0": 5}, "known": {"x": "y"}}, "must be texts by partition"),
        ("other_era", {"number": 1, "offsets": {"0": 5}, "known": {"0": 3}}, "must be texts by partition"),
        ("other_era", {"number": 1, "offsets": {"0": 5}, "known": {"1": "y"}}, "has partition 1, and 'offsets' not"),
        ("other_era", {"number": 1, "offsets": {"0": -5}, "known": {"0": "y"}}, "an offset from 0 on"),
        ("other_era", {"number": 2**40, "offsets": {"0": 5}}, "no stream with number"),
        ("resolve", {"bound": {"kind": "latest"}, "streams": [], "assigned": {"plants": 3}}, "must be a list, not 3"),
        ("resolve", {"bound": {"kind": "latest"}, "streams": [], "assigned": {"plants": "ab"}}, "must be a list"),
        ("resolve", {"bound": {"kind": "latest"}, "streams": [], "assigned": {"a": [[1]]}}, "a list of whole numbers"),
    ],
)
def test_an_action_that_makes_no_sense_is_refused(
    broker: qflow.Broker, act: Any, name: str, fields: dict[str, Any], text: str
) -> None:
    """With a sentence that names what is wrong."""
    assert text in str(refused(lambda: act(name, **fields)))
