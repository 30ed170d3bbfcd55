"""What the examples say when they are called without a spool."""

import sys


def spool_of(doc: str | None) -> str:
    """Return the first argument, or end with what the example's docstring says about its use."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(f"{(doc or '').strip()}\n\nSPOOL is a directory, new or empty.", file=sys.stderr)
        raise SystemExit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    return sys.argv[1]
