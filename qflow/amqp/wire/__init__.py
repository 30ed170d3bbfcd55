"""AMQP 0-9-1 as bytes: a machine that takes what came and yields what it means, without any I/O.

`Connection` is given the bytes of a client and gives events; it is told what to answer and gives the bytes to send. Who
reads and writes them, when, and what exchanges and queues do, is nothing it knows. Whatever a client sends, it is an
event, an AMQP error or the end of the connection, and what is kept of it is bounded by `Limits`.
"""
