"""Disk: blocks, the transaction log, the spill store. Nothing here knows a queue."""
