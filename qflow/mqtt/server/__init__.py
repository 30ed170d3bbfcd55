"""The server: connections, sessions, the hub that gives messages to them, and what of it is in the log."""
