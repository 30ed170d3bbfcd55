"""What users may do who may not do everything."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from pamqp import commands

from amqp_client import method
from amqp_clients import serving
from amqp_raw import Queue, Raw
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, Permission, User, Users


def test_a_queue_that_the_server_names_is_asked_for_as_amq_gen(tmp_path: Path) -> None:
    """Also where it has a dead-letter exchange, for which the queue has to be readable: 403 was for `amq.default`."""
    mine = "^(amq[.]gen-|mine$)"
    anna = Account(User("anna", frozenset(), {"/": Permission(mine, mine, mine)}), PasswordHash.of("secret", n=2))
    users = tmp_path / "users.json"
    users.write_text(Users(MappingProxyType({"anna": anna})).text())
    with (
        serving(tmp_path / "spool", "--users", str(users)) as (server, _),
        Raw(server.port).open(response="\0anna\0secret") as raw,
    ):
        arguments = {"x-dead-letter-exchange": "mine"}
        declare = Queue.Declare(exclusive=True, arguments=arguments)
        answer = raw.ask(declare, Queue.DeclareOk, commands.Channel.Close)
        assert isinstance(answer, Queue.DeclareOk), answer.reply_text
        assert answer.queue.startswith("amq.gen-")


def test_line_ends_of_a_declared_name_are_taken_out_before_rights_are_looked_at(tmp_path: Path) -> None:
    """Of queues and exchanges, and with `passive`, too: nobody gets at what is not theirs by them."""
    rest = "^(?!secret)"
    anna = Account(User("anna", frozenset(), {"/": Permission(rest, rest, rest)}), PasswordHash.of("secret", n=2))
    users = tmp_path / "users.json"
    users.write_text(Users(MappingProxyType({"anna": anna})).text())
    declared = [
        (Queue.Declare(0, "Zsecret", durable=True), 403),
        (commands.Exchange.Declare(0, "secZret", durable=True), 403),
        (Queue.Declare(0, "aZb", durable=True), "ab"),
        (Queue.Declare(0, "Zab", passive=True), "ab"),
        (Queue.Declare(0, "Z", exclusive=True), "amq.gen-"),
    ]
    with serving(tmp_path / "spool", "--users", str(users)) as (server, _):
        for declare, outcome in declared:
            with Raw(server.port).open(response="\0anna\0secret") as raw:
                raw.send(method(1, declare).replace(b"Z", b"\n"))  # which no client library sends
                answer = raw.until(Queue.DeclareOk, commands.Channel.Close)
                told = answer.queue if isinstance(answer, Queue.DeclareOk) else answer.reply_code
                assert told == outcome or (outcome == "amq.gen-" and told.startswith(outcome))
