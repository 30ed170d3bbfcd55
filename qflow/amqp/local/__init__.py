"""A server of AMQP for the processes of one machine that use a spool: started by the first, ended after the last.

`place` is where they find each other, `joining` what a client does, `server` the process; `python -m qflow.amqp.local`
runs it. What a client imports needs neither asyncio nor the engine.
"""
