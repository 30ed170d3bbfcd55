"""Exchanges, bindings and queues of AMQP: what is declared, where a message goes, and the records of it in the log."""
