"""The inbox of a spool: batches of messages that are handed in from outside."""
