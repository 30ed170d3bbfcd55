"""The log: keys and values, reading and writing them, and the one thread that does the latter."""
