"""Spill stores: where messages go that do not fit in memory."""
