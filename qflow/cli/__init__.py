"""The `qflow` command: one subcommand a file."""
