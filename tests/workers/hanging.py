"""A module whose import does not end."""

import os
import threading

from qflow.workers import ending

ending.LONGEST_END_S = -1.0
os.write(1, b"is imported\n")
threading.Event().wait()
