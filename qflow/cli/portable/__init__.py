"""Queues and streams as files that other programs read: `qflow export` and `qflow import`."""
