"""What a client says when it logs in: a name and a password, or a certificate."""

from __future__ import annotations

from typing import Any

from pamqp import decode

from qflow.amqp.errors import AmqpError
from qflow.amqp.wire.limits import DEFAULT_LIMITS
from qflow.amqp.wire.tables import check_table
from qflow.named_tuples import NamedTuple
from qflow.serving.certificates import common_name

PLAIN, AMQPLAIN, EXTERNAL = "PLAIN", "AMQPLAIN", "EXTERNAL"


class Credentials(NamedTuple):
    """A name, and the password; None: a certificate has shown it."""

    name: str
    password: str | None


def credentials(mechanism: str, response: bytes, certificate: dict[str, Any] | None) -> Credentials | None:
    """Return what a client says of itself; None if it says nothing that can be understood.

    Args:
        certificate: that of the client, checked by TLS, as `SSLSocket.getpeercert` returns it; None or empty for none.
    """
    if mechanism == PLAIN:
        parts = response.split(b"\0")
        return Credentials(_text(parts[1]), _text(parts[2])) if len(parts) == 3 else None
    if mechanism == AMQPLAIN:
        try:
            encoded = len(response).to_bytes(4, "big") + response
            check_table(encoded, 0, len(encoded), DEFAULT_LIMITS)
            table = decode.field_table(encoded)[1]
        except (AmqpError, ValueError, IndexError, KeyError):
            return None
        name, password = table.get("LOGIN"), table.get("PASSWORD")
        return Credentials(name, password) if isinstance(name, str) and isinstance(password, str) else None
    name = common_name(certificate) if mechanism == EXTERNAL else None
    return None if name is None else Credentials(name, None)


def _text(part: bytes) -> str:
    return part.decode(errors="surrogateescape")
