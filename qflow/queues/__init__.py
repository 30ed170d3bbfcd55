"""Queues: where memory and storage meet."""
