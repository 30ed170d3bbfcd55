"""The `qflow` command: one file for each subcommand."""
