"""Clients of paho that have a thread of their own, and their end."""

from __future__ import annotations

from paho.mqtt.client import Client


def stop(client: Client) -> None:
    """End its thread, and close the sockets that woke it: left to the collector, they may go first, and say so."""
    client.loop_stop()
    client._reset_sockets()
