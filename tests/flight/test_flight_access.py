"""Who is let in: tokens, TLS, addresses; and how `qflow serve --flight` begins and ends."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pf = pytest.importorskip("pyarrow.flight")

import qflow  # noqa: E402
import qflow.aio  # noqa: E402
import qflow.flight  # noqa: E402
from flight.test_flight_reading import refused, ticket  # noqa: E402
from qflow.cli.main import app  # noqa: E402
from qflow.flight import trust  # noqa: E402
from qflow.flight.access import Access, digest, read_tokens  # noqa: E402
from qflow.serving.certificates import Certificates  # noqa: E402

PEM = Path(__file__).parent.parent / "serving" / "certificates"
CERTIFICATES = Certificates(PEM / "server.pem", PEM / "server.key")
ONE, OTHER = "one-token-0123456789", "other-token-0123456789"


def bearing(token: str) -> Any:
    """Return the options of a call with a token."""
    return pf.FlightCallOptions(headers=[(b"authorization", b"Bearer " + token.encode())])


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A file with one token."""
    path = tmp_path / "tokens"
    path.write_text(f"# of the cluster\n\n{ONE}\n")
    return path


def test_a_call_without_a_token_is_refused(broker: qflow.Broker, tokens: Path) -> None:
    """So is one with a wrong one; the right one is let in, by pyarrow and by `qflow.connect`."""
    with qflow.flight.serve(broker, port=0, token_file=tokens) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        with pf.connect(url) as client:
            with pytest.raises(pf.FlightUnauthenticatedError, match="needs a token, and the call has none"):
                list(client.list_flights())
            with pytest.raises(pf.FlightUnauthenticatedError, match="not one of this door"):
                list(client.list_flights(options=bearing(OTHER)))
            assert len(list(client.list_flights(options=bearing(ONE)))) == 1
        with pytest.raises(qflow.InvalidArgument, match="needs a token"):
            qflow.connect(url)
        with pytest.raises(qflow.InvalidArgument, match="not one of this door"):
            qflow.connect(url, token=OTHER)
        for shown in ({"token": ONE}, {"token_file": tokens}):
            with qflow.connect(url, **shown) as remote:
                assert remote.queues() == ["jobs"]
        with pytest.raises(qflow.InvalidArgument, match="in two ways"):
            qflow.connect(url, token=ONE, token_file=tokens)


@pytest.mark.parametrize(
    "wrong", ["two words-0123456789", "ends\nhere-0123456789", "sch\u00f6n-0123456789", "\ud800", "\0"]
)
def test_a_token_that_cannot_be_one_is_told_what_it_is(
    broker: qflow.Broker, tokens: Path, tmp_path: Path, wrong: str
) -> None:
    """In a sentence that does not show it, before anything is sent; white space around one is left out."""
    with qflow.flight.serve(broker, port=0, token_file=tokens) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        with pytest.raises(
            qflow.InvalidArgument, match="which no token has: give one as it stands in the file"
        ) as caught:
            qflow.connect(url, token=wrong)
        assert "0123456789" not in str(caught.value)
        with qflow.connect(url, token=f" {ONE}\r\n") as remote:
            assert remote.queues() == ["jobs"]
        (tmp_path / "shown").write_bytes("\ufeffone-token".encode())
        with pytest.raises(qflow.InvalidArgument, match="which no token has"):
            qflow.connect(url, token_file=tmp_path / "shown")


def test_a_token_that_ends_in_mid_read_ends_the_read(broker: qflow.Broker, tokens: Path) -> None:
    """With a sentence; what was read is whole."""
    broker.declare_stream("logs", topics=["log/#"])
    broker.publish("log/a", b"one")
    with (
        qflow.flight.serve(broker, port=0, token_file=tokens) as server,
        pf.connect(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        reader = client.do_get(ticket(stream="logs", start=0, follow=True), bearing(ONE))
        assert reader.read_chunk().data["value"].to_pylist() == [b"one"]
        tokens.write_text(f"{OTHER}\n")
        server.access.tokens = read_tokens(tokens)
        with pytest.raises(pf.FlightUnauthenticatedError, match="not any more"):
            reader.read_chunk()


def test_a_session_ends_with_its_token(broker: qflow.Broker, tokens: Path) -> None:
    """Its next call is refused, and nothing hangs."""
    with (
        qflow.flight.serve(broker, port=0, token_file=tokens) as server,
        qflow.connect(f"grpc://127.0.0.1:{server.port}", token=ONE) as remote,
    ):
        jobs = remote.queue("jobs")
        jobs.put(b"kept")
        server.access.tokens = {digest(OTHER): float("inf")}
        with pytest.raises(qflow.QflowError):
            jobs.put(b"refused")
        with pytest.raises(qflow.BrokerClosed, match="the token of this call is not one of this door, or not any more"):
            jobs.put(b"refused")
    assert [one.body for one in broker.queue("jobs").get_many(10)] == [b"kept"]


def test_a_token_ends_at_its_moment(tokens: Path) -> None:
    """To the second that the file says."""
    tokens.write_text(f"{ONE} 2030-01-01T00:00:00Z\n{OTHER}\n")
    now = [1893455999.0]
    access = Access(read_tokens(tokens), lambda: now[0])
    access.check(digest(ONE))
    now[0] += 1
    access.check(digest(OTHER))
    with pytest.raises(pf.FlightUnauthenticatedError, match="has ended"):
        access.check(digest(ONE))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has none"),
        ("# nothing\n", "has none"),
        ("short\n", "line 1"),
        (f"{ONE} tomorrow\n", "the moment at which it ends"),
        (f"{ONE} 2030-01-01 extra\n", "the moment at which it ends"),
    ],
)
def test_a_file_of_tokens_that_makes_no_sense_is_refused(tokens: Path, text: str, words: str) -> None:
    """The text names the line, and shows no token."""
    tokens.write_text(text)
    with pytest.raises(qflow.InvalidArgument, match=words) as caught:
        read_tokens(tokens)
    assert ONE not in str(caught.value)


def test_tls_hides_what_goes_over_the_wire(broker: qflow.Broker, tokens: Path) -> None:
    """A client that trusts the certificate is let in; one that does not, and one without TLS, are told."""
    with qflow.flight.serve(broker, port=0, certificates=CERTIFICATES, token_file=tokens) as server:
        url = f"grpc+tls://127.0.0.1:{server.port}"
        with qflow.connect(url, token=ONE, ca=PEM / "ca.pem") as remote:
            remote.queue("jobs").put(b"a")
        with pytest.raises(qflow.InvalidArgument, match="is signed by nobody whom the system trusts"):
            qflow.connect(url, token=ONE)
        with pytest.raises(qflow.InvalidArgument, match="has expired or is signed|is signed by nobody whom '"):
            qflow.connect(url, token=ONE, ca=PEM / "renewed.pem")
        with pytest.raises(qflow.InvalidArgument, match=r"TLS is spoken at .*: say grpc\+tls://"):
            qflow.connect(f"grpc://127.0.0.1:{server.port}", token=ONE)
    assert broker.queue("jobs").get().body == b"a"
    with pytest.raises(qflow.StorageError, match="nobody answers at grpc"):
        qflow.connect(url, token=ONE, ca=PEM / "ca.pem")


def test_what_is_wrong_with_certificates_is_said(broker: qflow.Broker) -> None:
    """Names, files, and a door without any."""
    ca = PEM / "ca.pem"
    with qflow.flight.serve(broker, host="127.0.0.2", port=0, certificates=CERTIFICATES) as server:
        with pytest.raises(qflow.InvalidArgument, match=r"is for another name than '127\.0\.0\.2'"):
            qflow.connect(f"grpc+tls://127.0.0.2:{server.port}", ca=ca)
        with pytest.raises(qflow.InvalidArgument, match="cannot be used: .*: ca, cert and key are files in PEM"):
            qflow.connect(f"grpc+tls://127.0.0.2:{server.port}", ca=PEM / "server.key")
    with qflow.flight.serve(broker, port=0) as server:
        with pytest.raises(qflow.InvalidArgument, match="no TLS is spoken at .*: say grpc://"):
            qflow.connect(f"grpc+tls://127.0.0.1:{server.port}", ca=ca)
        with pytest.raises(qflow.InvalidArgument, match=r"certificates are for grpc\+tls://"):
            qflow.connect(f"grpc://127.0.0.1:{server.port}", cert=ca, key=ca)
        with pytest.raises(qflow.InvalidArgument, match="needs its private key"):
            qflow.connect(f"grpc+tls://127.0.0.1:{server.port}", cert=ca)
    with pytest.raises(qflow.InvalidArgument, match="is for a URL"):
        qflow.connect(broker.path, cert=ca, key=ca)


@pytest.mark.parametrize(("number", "words"), [(10, "has expired"), (9, "look at the clocks"), (64, "another name")])
def test_certificates_out_of_their_time_are_named(number: int, words: str) -> None:
    """By what OpenSSL says of them."""
    error = ssl.SSLCertVerificationError("")
    error.verify_code, error.verify_message = number, "no"
    assert words in trust._wrong_certificate("grpc+tls://a:1", "a", error, trust.Trust())


@pytest.mark.parametrize("shakes_hands", [False, True])
def test_a_relay_behind_which_nobody_is_says_nothing_of_certificates(shakes_hands: bool) -> None:
    """It takes connections, and ends them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM / "server.pem", PEM / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def take() -> None:
            taken, _ = relay.accept()
            if shakes_hands:
                taken = context.wrap_socket(taken, server_side=True)
            taken.close()

        thread = threading.Thread(target=take)
        thread.start()
        assert (
            trust.what_is_wrong(f"grpc+tls://127.0.0.1:{relay.getsockname()[1]}", trust.Trust(PEM / "ca.pem")) is None
        )
        thread.join()


async def _queues(url: str, **files: Any) -> list[str]:
    async with qflow.aio.connect(url, **files) as remote:
        return await remote.queues()


def test_a_client_shows_the_certificate_that_a_door_asks_for(broker: qflow.Broker) -> None:
    """By threads and by tasks; without one it is told."""
    asking = Certificates(PEM / "server.pem", PEM / "server.key", PEM / "ca.pem")
    files = {"ca": PEM / "ca.pem", "cert": PEM / "client.pem", "key": PEM / "client.key"}
    with qflow.flight.serve(broker, port=0, certificates=asking) as server:
        url = f"grpc+tls://127.0.0.1:{server.port}"
        with qflow.connect(url, **files) as remote:
            assert remote.queues() == ["jobs"]
        assert asyncio.run(_queues(url, **files)) == ["jobs"]
        with pytest.raises(qflow.InvalidArgument, match="asks clients for a certificate: give yours as cert"):
            qflow.connect(url, ca=PEM / "ca.pem")
        with pytest.raises(qflow.InvalidArgument, match="asks clients for a certificate"):
            asyncio.run(_queues(url, ca=PEM / "ca.pem"))
    other = Certificates(PEM / "server.pem", PEM / "server.key", PEM / "weak.pem")
    with (
        qflow.flight.serve(broker, port=0, certificates=other) as server,
        pytest.raises(
            qflow.InvalidArgument, match=r"does not take the certificate '.*client\.pem': .* has expired, or"
        ),
    ):
        qflow.connect(f"grpc+tls://127.0.0.1:{server.port}", **files)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("has_tls", [False, True])
def test_a_public_address_needs_tokens_and_tls(
    broker: qflow.Broker, tokens: Path, has_tokens: bool, has_tls: bool
) -> None:
    """Both; it refuses to begin otherwise."""
    options: dict[str, Any] = {"certificates": CERTIFICATES if has_tls else None}
    options["token_file"] = tokens if has_tokens else None
    if has_tokens and has_tls:
        with qflow.flight.serve(broker, host="0.0.0.0", port=0, **options) as server:
            assert server.port
    else:
        with pytest.raises(qflow.InvalidArgument, match="can be reached by others than this machine"):
            qflow.flight.serve(broker, host="0.0.0.0", port=0, **options)


def test_an_address_that_is_taken_is_refused(broker: qflow.Broker, server: qflow.flight.Server) -> None:
    """Before anything is begun."""
    with pytest.raises(OSError, match="in use"):
        qflow.flight.serve(broker, port=server.port)


def test_a_client_that_does_not_read_holds_no_close_up(broker: qflow.Broker, server: qflow.flight.Server) -> None:
    """It is left behind."""
    broker.publish_many((f"plant/{number % 3}", bytes(100_000)) for number in range(300))
    client = pf.connect(f"grpc://127.0.0.1:{server.port}")
    reader = client.do_get(ticket(stream="plants", partition=0))
    reader.read_chunk()
    server.close()
    assert isinstance(refused(reader.read_all), qflow.BrokerClosed)
    client.close()


# `qflow serve` --------------------------------------------------------------------------------------------------------


class Process:
    """`qflow serve` in a process."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qflow", "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def warning(self, text: str) -> str:
        """Return the next line of stderr that has a text."""
        return self.until(text).splitlines()[-1]

    def until(self, text: str) -> str:
        """Return the next lines of stderr, to the first that has a text."""
        assert self.process.stderr is not None
        lines = ""
        for line in self.process.stderr:
            lines += line
            if text in line:
                return lines
        raise AssertionError(f"it has ended, and did not say {text!r}")


@pytest.fixture
def served(tmp_path: Path, tokens: Path) -> Iterator[tuple[Process, str]]:
    """A process that serves with TLS and tokens, and its URL; whoever is to finish something has an hour."""
    options = ["--flight", "127.0.0.1:0", "--cert", PEM / "server.pem", "--key", PEM / "server.key", "--grace", "3600"]
    process = Process(tmp_path / "spool", *options, "--token-file", tokens)
    name, _, address = process.line().partition(" on ")
    assert name == "flight+tls"
    yield process, f"grpc+tls://{address}"
    process.process.kill()
    process.process.communicate()


def test_serve_tells_that_flight_keeps_the_certificates_of_its_start(tmp_path: Path, tokens: Path) -> None:
    """At each reload that finds others, beside doors that take them."""
    for name in ("server.pem", "server.key"):
        shutil.copy(PEM / name, tmp_path / name)
    options = ["--flight", "127.0.0.1:0", "--cert", tmp_path / "server.pem", "--key", tmp_path / "server.key"]
    process = Process(tmp_path / "spool", *options, "--token-file", tokens)
    try:
        assert process.line().startswith("flight+tls on ")
        reloaded = []
        for name in ("server", "renewed", "server"):
            shutil.copy(PEM / f"{name}.pem", tmp_path / "server.pem")
            shutil.copy(PEM / f"{name}.key", tmp_path / "server.key")
            process.process.send_signal(signal.SIGHUP)
            reloaded.append(process.until("are read anew"))
        assert ["Flight keeps the certificates" in text for text in reloaded] == [False, True, False]
    finally:
        process.process.kill()
        process.process.communicate()


def test_serve_reloads_tokens_and_drains(served: tuple[Process, str], tokens: Path) -> None:
    """On SIGHUP other tokens are good; on SIGTERM a follower is told, and the process ends."""
    process, url = served
    with qflow.connect(url, token=ONE, ca=PEM / "ca.pem") as remote:
        remote.declare_stream("logs", topics=["log/#"])
        remote.publish("log/a", b"one")
    tokens.write_text(f"{OTHER}\n")
    process.process.send_signal(signal.SIGHUP)
    process.warning("are read anew")
    with pytest.raises(qflow.InvalidArgument, match="not one of this door"):
        qflow.connect(url, token=ONE, ca=PEM / "ca.pem")
    tokens.write_text("short\n")
    process.process.send_signal(signal.SIGHUP)
    assert "line 1" in process.warning("nothing is reloaded")
    with pf.connect(url, tls_root_certs=(PEM / "ca.pem").read_bytes()) as client:
        reader = client.do_get(ticket(stream="logs", start=0, follow=True), bearing(OTHER))
        assert reader.read_chunk().data["value"].to_pylist() == [b"one"]
        process.process.send_signal(signal.SIGTERM)
        assert isinstance(refused(reader.read_chunk), qflow.BrokerClosed)
    assert process.process.wait(60) == 128 + signal.SIGTERM


def test_sessions_that_hold_nothing_end_with_the_first_signal(tmp_path: Path) -> None:
    """What waits for messages is no reason to stay; a delivery that is held is, until it is settled."""
    process = Process(tmp_path / "spool", "--flight", "127.0.0.1:0", "--grace", "3600")
    url = f"grpc://{process.line().partition(' on ')[2]}"
    try:
        with qflow.connect(url) as remote, qflow.connect(url) as idle, ThreadPoolExecutor() as pool:
            jobs = remote.declare_queue("jobs")
            jobs.put_many([b"a", b"b", b"c"])
            held = jobs.get()
            waiting = pool.submit(idle.declare_queue("others").get)
            process.process.send_signal(signal.SIGTERM)
            with pytest.raises(qflow.BrokerClosed):
                waiting.result(60)
            assert process.process.poll() is None
            jobs.put(b"d")
            more = pool.submit(jobs.get)
            held.ack()
            with pytest.raises(qflow.BrokerClosed):
                more.result(60)
            assert process.process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.process.kill()
        process.process.communicate()
    with qflow.open(tmp_path / "spool") as broker:
        assert broker.queue("jobs").get_many(10).bodies == [b"b", b"c", b"d"]


def test_a_client_that_does_not_read_holds_no_process_up(served: tuple[Process, str]) -> None:
    """The second signal ends the drain, and the process, though one has not read what it asked for."""
    process, url = served
    with qflow.connect(url, token=ONE, ca=PEM / "ca.pem") as remote:
        remote.declare_stream("logs", topics=["log/#"])
        remote.publish_many(("log/a", bytes(100_000)) for _ in range(300))
        remote.declare_stream("others", topics=["other/#"])
        certificate = (PEM / "ca.pem").read_bytes()
        with (
            pf.connect(url, tls_root_certs=certificate) as client,
            pf.connect(url, tls_root_certs=certificate) as other,
        ):
            reader = client.do_get(ticket(stream="logs"), bearing(ONE))
            reader.read_chunk()
            follower = other.do_get(ticket(stream="others", follow=True), bearing(ONE))
            process.process.send_signal(signal.SIGTERM)
            assert isinstance(refused(follower.read_chunk), qflow.BrokerClosed)  # two signals at once may be one
            assert process.process.poll() is None
            process.process.send_signal(signal.SIGTERM)
            assert process.process.wait(60) == 128 + signal.SIGTERM


def test_a_program_that_closes_nothing_ends(tmp_path: Path) -> None:
    """Its door, and what came through it, do not hold it up."""
    program = (
        "import sys, qflow, qflow.flight\n"
        "broker = qflow.open(sys.argv[1])\n"
        "server = qflow.flight.serve(broker, port=0)\n"
        "remote = qflow.connect(f'grpc://127.0.0.1:{server.port}')\n"
        "remote.declare_queue('jobs').put(b'a')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "left")], timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_an_owner_that_is_killed_ends_its_clients(served: tuple[Process, str], tmp_path: Path) -> None:
    """A session is told that it has ended; what was confirmed is there."""
    process, url = served
    with qflow.connect(url, token=ONE, ca=PEM / "ca.pem") as remote:
        jobs = remote.declare_queue("jobs")
        jobs.put(b"confirmed")
        process.process.kill()
        with pytest.raises(qflow.QflowError):
            jobs.put(b"in doubt")
    process.process.wait()
    with qflow.open(tmp_path / "spool") as broker:
        assert broker.queue("jobs").get().body == b"confirmed"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--flight", "0.0.0.0:0"], "needs --token-file"),
        (["--flight", "127.0.0.1:0", "--token-file", "none"], "cannot be read"),
        (["--flight", "127.0.0.1:0", "--cert", PEM / "server.pem"], "--flight needs --cert and --key"),
        (["--amqp", "127.0.0.1:0", "--token-file", "none"], "say --flight"),
        (["--flight", "nowhere"], "an address is HOST:PORT"),
    ],
)
def test_serve_refuses_what_makes_no_sense(tmp_path: Path, options: list[object], words: str) -> None:
    """Before a spool is made."""
    found = CliRunner().invoke(app, ["serve", str(tmp_path / "spool"), *map(str, options)])
    assert found.exit_code == 2
    assert words in re.sub(r"[\s│]+", " ", found.output)
    assert not (tmp_path / "spool").exists()
