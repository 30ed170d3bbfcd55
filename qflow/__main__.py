"""`python -m qflow` is the `qflow` command."""

from qflow.cli.main import main

if __name__ == "__main__":
    main()
