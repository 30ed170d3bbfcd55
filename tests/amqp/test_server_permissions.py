"""What users may do who may not do everything."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from pamqp import commands

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
