"""Hosts on this machine that share nothing but a network: namespaces, each with a cable to a switch on this host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


class Network:
    """A switch, and hosts that are plugged into it, by `ip` of iproute2. `close` takes all of it away."""

    def __init__(self, hosts: int) -> None:
        """Raises CalledProcessError: this machine, or this user, may not have one."""
        number = os.getpid() % 2**16
        self._name = f"qf{number:x}"
        prefix = f"10.{64 + number // 2**8 % 128}.{number % 2**8}"  # one that others are unlikely to have
        self.here = f"{prefix}.1"
        """The address of this host."""
        self.addresses = [f"{prefix}.{2 + host}" for host in range(hosts)]
        self._names = [f"{self._name}-{host}" for host in range(hosts)]
        try:
            _ip("link", "add", self._name, "type", "bridge")
            _ip("address", "add", f"{self.here}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
            for name, address in zip(self._names, self.addresses, strict=True):
                _ip("netns", "add", name)
                _ip("link", "add", name, "type", "veth", "peer", "name", "cable", "netns", name)
                _ip("link", "set", name, "master", self._name, "up")
                _ip("-netns", name, "address", "add", f"{address}/24", "dev", "cable")
                for device in ("cable", "lo"):
                    _ip("-netns", name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def on(self, host: int) -> list[str]:
        """Return the beginning of a command that runs on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def close(self) -> None:
        """Take it away, as far as it is there."""
        for words in [*(("netns", "delete", name) for name in self._names), ("link", "delete", self._name)]:
            subprocess.run(["ip", *words], capture_output=True, check=False)


class Loopback:
    """In place of a network, where there can be none: addresses of this machine."""

    def __init__(self, hosts: int) -> None:
        self.here = "127.0.0.1"
        self.addresses = [f"127.0.0.{2 + host}" for host in range(hosts)]

    def on(self, host: int) -> list[str]:
        """Return nothing that a command begins with."""
        return []

    def close(self) -> None:
        """Nothing is there."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=30)


def network_of(hosts: int) -> Network | Loopback:
    """Return a network, or say why this machine has none."""
    missing = [tool for tool in ("ip", "openssl") if shutil.which(tool) is None]
    try:
        if not missing:
            return Network(hosts)
        why = f"there is no `{missing[0]}`"
    except subprocess.CalledProcessError as error:
        why = f"`{' '.join(error.cmd)}` says {error.stderr.strip()!r}"
    print(f"hosts are addresses of this machine, without a network between them: {why}")
    return Loopback(hosts)


def certify(directory: Path, address: str) -> None:
    """Make a certificate for an address, `server.pem`, which is its own authority, and `server.key`."""
    files = ["-keyout", directory / "server.key", "-out", directory / "server.pem"]
    name = ["-subj", "/CN=broker", "-addext", f"subjectAltName=IP:{address}"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *name]
    subprocess.run(command, capture_output=True, check=True, timeout=60)
