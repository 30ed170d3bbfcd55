"""A worker's process, started by its supervisor."""

import sys

from qflow.workers.worker import main

sys.exit(main())
