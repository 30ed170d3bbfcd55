"""kombu, and so Celery, on a spool without a server to install: `broker_url = "qflow:///path/to/spool"`.

kombu finds transports by a table of its own and has no entry points for them. But with the module that messages are
serialized by, which Celery imports at its start, it loads the entry points for serializers; the one of this package
imports this module, which adds the transport to the table. A program that makes a `kombu.Connection` and imports no
more of kombu before that has to import it itself.
"""

from kombu.transport import TRANSPORT_ALIASES

TRANSPORT_ALIASES["qflow"] = "qflow.kombu.transport:Transport"

SERIALIZER = (None, None, "application/x-qflow")
"""What kombu asks of the entry point: a serializer, of which there is none: it can neither encode nor decode."""
