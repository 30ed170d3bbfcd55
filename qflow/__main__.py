"""The `qflow` command, which is `python -m qflow`, too."""

import os
import signal


def main() -> None:
    """Run the command line. While it is being imported, Ctrl-C ends the process as it is: there is nothing to tell."""
    # Linux ends the first process of a container by no signal that it has no handler for: `docker stop` would wait.
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from qflow.cli.main import main as run

    run(hears_interrupts=is_heard)


if __name__ == "__main__":
    main()
