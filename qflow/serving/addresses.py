"""Addresses of doors and of clients."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import ExitStack
from typing import Any

import attrs

from qflow.errors import InvalidArgument

_NO_SUCH_FAMILY = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
"""`localhost` may stand for an address of IPv6 where there is none."""


@attrs.frozen
class Address:
    """Where a door is to be: a name or an IP address, and a port; 0 = any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address of a text such as `127.0.0.1:5672` or `[::1]:5672`. Raises InvalidArgument: it is none."""
        host, colon, port = text.rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if is_bracketed else host
        is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 2**16
        if not colon or not host or not is_port or (":" in host and not is_bracketed) or not host.isprintable():
            shape = "HOST:PORT, such as 127.0.0.1:5672 or [::1]:5672, with a port up to 65535"
            raise InvalidArgument(f"an address is {shape}, not {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolved(address: Address) -> list[Any]:
    """Return the addresses of a name, as `socket.getaddrinfo` does. Raises InvalidArgument: it has none."""
    try:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{address.host!r} is no address of this machine: {why}") from error


def is_of_this_machine_alone(address: Address) -> bool:
    """Tell whether nobody on another machine can reach an address. Raises InvalidArgument: it is none."""
    return all(is_loopback(str(sockaddr[0])) for *_, sockaddr in resolved(address))


def occupy(address: Address) -> ExitStack:
    """Listen at an address, as all that its name stands for, until what is returned is closed; nobody is answered.

    Raises:
        InvalidArgument: it is none. OSError: it cannot be listened there.
    """
    found = resolved(address)
    with ExitStack() as stack:
        for family, kind, _, _, sockaddr in found:
            try:
                one = stack.enter_context(socket.socket(family, kind))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind(sockaddr)
                one.listen()
            except OSError as error:
                if error.errno not in _NO_SUCH_FAMILY or len(found) == 1:
                    raise
        return stack.pop_all()


def check_port(port: object) -> None:
    """Refuse what no server can listen at. Raises InvalidArgument: it is no port."""
    if type(port) is not int or not 0 <= port < 2**16:
        raise InvalidArgument(f"a port is a number from 0 to 65535, where 0 is any that is free, not {port!r}")


def is_loopback(address: str) -> bool:
    """Tell whether an IP address, also an IPv4 one that is mapped to IPv6, is of this machine alone."""
    found = ip_address(address)
    return found is not None and found.is_loopback


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an IP address, as IPv4 where it is one that is mapped to IPv6; None if the text is none."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found
