"""The owner's side of the door: a `Session` for each connection, and what brings frames to it."""
