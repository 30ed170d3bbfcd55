"""A door to the owner of a spool: other processes use its queues and streams through a socket in the spool.

`wire` is what goes over it, without any I/O; `server` is the owner's side, `client` the callers'.
"""
