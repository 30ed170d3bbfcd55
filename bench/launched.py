"""What a command takes: `python -m bench.launched COMMAND...` prints its seconds, peak RSS in bytes, and exit code.

A process of its own, and a small one: what the system knows as the peak of a process is at least that of the one that
started it. What the command writes to stdout goes nowhere.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter


def main(command: list[str]) -> None:
    begun = perf_counter()
    nowhere = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=[nowhere])
    _, status, used = os.wait4(pid, 0)
    print(json.dumps([perf_counter() - begun, used.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)]))


if __name__ == "__main__":
    main(sys.argv[1:])
