"""The process of a local server."""

import sys

from qflow.amqp.local.server import main

sys.exit(main(*sys.argv[1:]))
