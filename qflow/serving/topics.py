"""Topics that one door keeps from the others."""

from __future__ import annotations

AMQP_STREAMS = "amqp-stream/"
"""How topics of streams begin that AMQP declared. Their messages are none of MQTT: each virtual host has its own."""
