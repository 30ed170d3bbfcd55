"""The asyncio shell of the AMQP server: connections, channels, consumers, publishes."""
