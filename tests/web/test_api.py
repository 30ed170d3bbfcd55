"""The JSON API: every endpoint, what OpenAPI says of it, and who may do what."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")

from starlette.routing import Route

import inside
from qflow.serving.users import Topics, Users
from qflow.web.api import ENDPOINTS
from web_served import run, served, token, users


def test_openapi_describes_every_route_and_no_other(spool: Path) -> None:
    """Paths and methods of the document are those of the application."""

    async def test() -> None:
        async with served(spool) as site:
            document = (await site.client().get("/api/openapi.json")).json()
            described = {(path, method.upper()) for path, one in document["paths"].items() for method in one}
            routed = {
                (route.path, method)
                for route in site.app.routes
                if isinstance(route, Route) and route.path.startswith("/api/") and route.methods
                for method in route.methods - {"HEAD"}
            }
            assert described == routed - {("/api/openapi.json", "GET")}
            ids = [operation["operationId"] for one in document["paths"].values() for operation in one.values()]
            assert len(ids) == len(set(ids)) == len(ENDPOINTS)
            assert document["openapi"] == "3.1.0"

    run(test)


def test_a_program_does_by_the_api_what_the_page_does(spool: Path) -> None:
    """Put, look, move, purge, alter, publish, delete."""

    async def test() -> None:
        async with served(spool, users()) as site:
            api = site.api()
            await site.broker.declare_queues(["jobs", "other", "../x"])
            await site.broker.declare_stream("log", topics=["log/#"])
            await site.broker.bind("jobs", "log/jobs")

            async def post(path: str, **fields: Any) -> Any:
                answer = await api.post(path, json=fields)
                assert answer.status_code == 200, answer.text
                return answer.json()

            async def get(path: str, **query: Any) -> Any:
                answer = await api.get(path, params=query)
                assert answer.status_code == 200, answer.text
                return answer.json()

            packed = base64.b64encode(b"\xff\x00").decode()
            assert (await post("/api/queue/messages", queue="jobs", body_base64=packed, headers={"n": 1}))[
                "sequence"
            ] == 0
            (message,) = (await get("/api/queue/messages", queue="jobs"))["messages"]
            assert (message["body_base64"], message["headers"], message["size_bytes"]) == (packed, {"n": 1}, 2)
            assert await post("/api/publish", topic="log/jobs", body="hello") == {
                "topic": "log/jobs",
                "streams": {"log": 0},
                "queues": {"jobs": 1},
            }
            assert (await get("/api/stream/messages", stream="log"))["messages"][0]["body"] == "hello"
            assert (await get("/api/stream", stream="log"))["stats"]["messages"] == 1
            assert [one["name"] for one in (await get("/api/streams"))["streams"]] == ["log"]
            assert (await post("/api/queue/move", queue="jobs", to="../x", limit=1))["moved"] == {"../x": 1}
            assert (await get("/api/queue", queue="jobs"))["bindings"] == ["log/jobs"]
            changed = await post("/api/queue/alter", queue="jobs", limit_messages=5, on_overflow="drop_oldest")
            assert changed["changed"] == {"limit_messages": 5, "on_overflow": "drop_oldest"}
            assert (await post("/api/queue/purge", queue="../x", seen=1))["purged"] == 1
            assert {one["name"] for one in (await get("/api/queues", text="O"))["queues"]} == {"jobs", "other"}
            assert (await api.delete("/api/queue", params={"queue": "../x"})).json()["deleted"] is True
            assert (await get("/api/overview"))["version"]
            assert (await get("/api/live", since=0))["points"]
            for name in ("consumers", "connections", "findings", "events"):
                assert isinstance((await get(f"/api/{name}"))[name], list)
            subscription = await site.broker.subscribe("log", name="reader")
            await subscription.close()
            there = await api.delete("/api/subscription", params={"stream": "log", "subscription": "reader"})
            assert there.status_code == 200
            assert (await api.delete("/api/stream", params={"stream": "log"})).status_code == 200
            assert site.broker.streams() == []

    run(test)


def test_what_is_wrong_is_said_in_a_sentence(spool: Path) -> None:
    """Each with its status, and nothing is done."""

    async def test() -> None:
        async with served(spool, users()) as site:
            api = site.api()
            queue = await site.broker.declare_queue("jobs", max_message_bytes=100)
            await queue.put(b"one")
            wrong: list[tuple[int, str, dict[str, Any], str]] = [
                (404, "/api/queue/purge", {"queue": "job"}, "did you mean 'jobs'"),
                (409, "/api/queue/purge", {"queue": "jobs", "seen": 0}, "look again"),
                (400, "/api/queue/purge", {}, "'queue' is missing"),
                (400, "/api/queue/purge", {"queue": 7}, "must be a text"),
                (400, "/api/queue/purge", {"queue": "jobs", "seen": "many"}, "must be a number"),
                (400, "/api/queue/purge", {"queue": "jobs", "sen": 0}, "which takes queue, seen, newer"),
                (
                    400,
                    "/api/queue/messages",
                    {"queue": "jobs", "body": "x", "dedupe_key": "7"},
                    "'dedupe_key' is no field",
                ),
                (400, "/api/publish", {"topic": "a", "boddy": "x"}, "'boddy' is no field of POST /api/publish"),
                (400, "/api/queue/messages", {"queue": "jobs", "body_base64": "*"}, "base64"),
                (400, "/api/queue/messages", {"queue": "jobs", "headers": "x"}, "headers"),
                (400, "/api/queue/messages", {"queue": "jobs", "headers": '{"a":' * 100_000}, "is no JSON"),
                (400, "/api/queue/messages", {"queue": "jobs", "body": "\ud800"}, "half a character"),
                (400, "/api/publish", {"topic": "a", "body": "\udc80\ud800"}, "half a character"),
                (413, "/api/queue/messages", {"queue": "jobs", "body": "x" * 200}, "jobs"),
                (400, "/api/queue/move", {"queue": "jobs", "to": "jobs"}, "itself"),
                (400, "/api/queue/alter", {"queue": "jobs", "durable": False}, "'durable' is no field"),
                (400, "/api/queue/alter", {"queue": "jobs", "on_overflow": "burn"}, "on_overflow"),
                (400, "/api/publish", {"topic": "a/#", "body": ""}, "#"),
            ]
            for status, path, fields, words in wrong:
                sent = json.dumps(fields)
                answer = await api.post(path, content=sent, headers={"Content-Type": "application/json"})
                assert (answer.status_code, words in answer.json()["error"]) == (status, True), (path, answer.text)
            answer = await api.post(
                "/api/queue/purge", content=b"[" * 100_000, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 400
            assert (await api.post("/api/queue/purge", content=b"queue=jobs")).status_code == 415
            assert (await api.get("/api/queue/messages", params={"queue": "jobs", "most": 1000})).status_code == 400
            answer = await api.delete("/api/queue", params={"queue": "jobs", "sen": 0})
            assert (answer.status_code, "'sen' is no field" in answer.json()["error"]) == (400, True)
            answer = await api.post("/api/queue/purge", params={"seen": 0}, json={"queue": "jobs"})
            assert (answer.status_code, "'seen' goes into the body" in answer.json()["error"]) == (400, True)
            answer = await api.request("DELETE", "/api/queue", params={"queue": "jobs"}, json={"seen": 0})
            assert (answer.status_code, "takes no body" in answer.json()["error"]) == (400, True)
            assert (await api.get("/api/nothing")).json() == {"error": "Not Found"}
            assert len(queue) == 1

    run(test)


def test_permissions_of_the_users_file_decide(spool: Path) -> None:
    """A user sees, reads, writes and configures what the file says, and no more."""

    async def test() -> None:
        granted = users(rita=("", "", "^jobs$"), willi=("", "^jobs$", ""), conrad=("^jobs$", "", ""))
        async with served(spool, granted) as site:
            await site.broker.declare_queues(["jobs", "secret"])
            asked: list[tuple[str, str, dict[str, Any]]] = [
                ("GET", "/api/queue/messages", {"queue": "jobs"}),
                ("POST", "/api/queue/purge", {"queue": "jobs"}),
                ("POST", "/api/queue/messages", {"queue": "jobs", "body": "x"}),
                ("POST", "/api/queue/alter", {"queue": "jobs", "limit_messages": 9}),
                ("POST", "/api/queue/move", {"queue": "jobs", "to": "secret"}),
                ("POST", "/api/queue/redrive", {"queue": "jobs"}),
                ("GET", "/api/queue", {"queue": "secret"}),
                ("DELETE", "/api/queue", {"queue": "secret"}),
                ("POST", "/api/publish", {"topic": "news/anna", "body": ""}),
            ]
            may = {
                "rita": [200, 200, 403, 403, 403, 403, 403, 403, 403],
                "willi": [403, 403, 200, 403, 403, 403, 403, 403, 403],
                "conrad": [403, 403, 403, 200, 403, 403, 403, 403, 403],
            }
            for name, expected in may.items():
                api = site.api(name)
                got = [
                    (
                        await api.request(method, path, **({"json": given} if method == "POST" else {"params": given}))
                    ).status_code
                    for method, path, given in asked
                ]
                assert got == expected, name
                assert [one["name"] for one in (await api.get("/api/queues")).json()["queues"]] == ["jobs"]
                own = {"topic": f"news/{name}", "body": ""}
                assert (await api.post("/api/publish", json=own)).status_code == 200

    run(test)


@pytest.mark.parametrize("granted", [["#"], ["+/feed/#"], ["amqp-stream/#"]])
def test_a_topic_of_mqtt_leads_into_no_stream_of_amqp(granted: list[str], spool: Path) -> None:
    """Whose permissions are other ones: the server for MQTT takes no such topic either."""

    async def test() -> None:
        of = users(willi=("", "", ""))
        willi = of.accounts["willi"]
        may = attrs.evolve(willi, user=attrs.evolve(willi.user, topics=Topics(publish=granted)))
        async with served(spool, Users(MappingProxyType({**of.accounts, "willi": may}))) as site:
            stream = await site.broker.declare_stream("feed", topics=["amqp-stream/feed/#"])
            written = {"topic": "amqp-stream/feed/x", "body": "x"}
            assert (await site.api("willi").post("/api/publish", json=written)).status_code == 403
            assert (await stream.stats()).messages == 0
            assert (await site.api().post("/api/publish", json=written)).json()["streams"] == {"feed": 0}

    run(test)


def test_who_may_do_nothing_sees_sums_and_no_names(spool: Path) -> None:
    """As the table of the page says."""

    async def test() -> None:
        async with served(spool, users(niko=("", "", ""))) as site:
            inside.still(site.broker.broker)  # which would look at the queue before there is a message
            await (await site.broker.declare_queue("jobs")).put(b"x")
            await site.broker.declare_stream("log", topics=["log/#"])
            api = site.api("niko")
            overview = (await api.get("/api/overview")).json()
            assert (overview["totals"]["messages"], overview["path"]) == (1, str(spool))
            for name in ("queues", "streams", "consumers", "connections", "findings", "events"):
                assert (await api.get(f"/api/{name}")).json()[name] == [], name

    run(test)


def test_a_dead_letter_queue_is_named_by_who_may_read_here_and_write_there(spool: Path) -> None:
    """Else whoever configures one queue would have messages forged into any other."""

    async def test() -> None:
        granted = users(
            conrad=("^jobs$", "^jobs$", "^jobs$"), willi=("^jobs$", ".*", ""), olga=("^jobs$", ".*", "^jobs$")
        )
        async with served(spool, granted) as site:
            jobs = await site.broker.declare_queue("jobs")
            await site.broker.declare_queue("secret")
            for name, words in (("conrad", "may not write 'secret'"), ("willi", "may not read 'jobs'")):
                answer = await site.api(name).post("/api/queue/alter", json={"queue": "jobs", "dead_letter": "secret"})
                assert (answer.status_code, words in answer.json()["error"]) == (403, True), answer.text
                browser = await site.browser(name)
                form = {"csrf": await token(browser), "queue": "jobs", "dead_letter": "secret"}
                assert (await browser.post("/do/alter", data=form)).status_code == 403
                assert jobs.settings.dead_letter is None
            answer = await site.api("olga").post("/api/queue/alter", json={"queue": "jobs", "dead_letter": "secret"})
            assert (answer.status_code, jobs.settings.dead_letter) == (200, "secret")
            for nothing in (None, ""):
                fields = {"queue": "jobs", "dead_letter": nothing}
                assert (await site.api("conrad").post("/api/queue/alter", json=fields)).status_code == 200
            assert jobs.settings.dead_letter is None
            wrong = await site.api("conrad").post("/api/queue/alter", json={"queue": "jobs", "dead_letter": 7})
            assert wrong.status_code == 400

    run(test)


def test_without_users_the_api_reads_and_changes_nothing(spool: Path) -> None:
    """Each action is refused with the remedy."""

    async def test() -> None:
        async with served(spool) as site:
            api = site.client()
            queue = await site.broker.declare_queue("jobs")
            await queue.put(b"one")
            for endpoint in ENDPOINTS:
                if endpoint.method == "GET":
                    continue
                known = {"queue": "jobs", "stream": "log", "topic": "t", "to": "jobs", "subscription": "s"}
                given = {field.name: known[field.name] for field in endpoint.fields if field.name in known}
                fields: dict[str, Any] = {"json": given} if endpoint.has_body else {"params": given}
                answer = await api.request(endpoint.method, endpoint.path, **fields)
                assert answer.status_code == 403, (endpoint.path, answer.text)
                assert "--users FILE" in answer.json()["error"]
            assert len(queue) == 1
            assert (await api.get("/api/queue/messages", params={"queue": "jobs"})).json()["messages"][0][
                "body"
            ] == "one"

    run(test)
