"""Partitions of streams in the log: reading them, what may stay, and who has published and read how far."""
