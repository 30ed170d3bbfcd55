"""A worker's process: its supervisor runs this file, so that no file of its directory is taken for a module."""

import sys
from pathlib import Path

if __name__ == "__main__":  # what a function spawns by multiprocessing runs this, too
    sys.path.insert(0, str(Path(__file__).parents[2]))  # this package, until the job says where else to look
    from qflow.workers.worker import main

    main()
