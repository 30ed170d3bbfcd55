"""The `qflow` command, which is `python -m qflow`, too."""

import signal


def main() -> None:
    """Run the command line. While it is being imported, Ctrl-C ends the process as it is: there is nothing to tell."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from qflow.cli.main import main as run

    run(hears_interrupts=is_heard)


if __name__ == "__main__":
    main()
