"""A work queue for RabbitMQ's client pika: confirmed jobs, workers that may die, and jobs that nobody can do.

python examples/amqp_work_queue.py SPOOL      SPOOL may be the URL of a broker that runs: amqp://guest:guest@127.0.0.1
"""

import json
from collections import Counter
from uuid import uuid4

import pika
from amqp_server import serving
from flights import flights
from usage import spool_of

JOBS = 1_000
QUEUE = f"flights-{uuid4().hex}"
FAILED = f"{QUEUE}-failed"
PERSISTENT = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)


def publish(url: str) -> None:
    """Declare the queues and publish the jobs, one of them nonsense; each is confirmed when it is synced."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(FAILED, durable=True)
        letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": FAILED}
        channel.queue_declare(QUEUE, durable=True, arguments=letters)
        for job in [*flights(JOBS - 1), b"nonsense"]:
            channel.basic_publish("", QUEUE, job, PERSISTENT, mandatory=True)


def work(url: str, carriers: Counter[str], dies_after: int | None = None) -> None:
    """Do jobs until there are none; or leave in the middle of one, without a word."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=100)
    for number, (method, _, job) in enumerate(channel.consume(QUEUE, inactivity_timeout=1)):
        if method is None or number == dies_after:
            break
        try:
            carriers[json.loads(job)["carrier"]] += 1
        except ValueError:
            channel.basic_reject(method.delivery_tag, requeue=False)  # to the dead letters
        else:
            channel.basic_ack(method.delivery_tag)
    connection.close()  # what it had and did not ack goes to the next worker


def main(spool: str) -> None:
    with serving(spool) as url:
        publish(url)
        carriers: Counter[str] = Counter()
        work(url, carriers, dies_after=300)
        work(url, carriers)
        assert carriers.total() == JOBS - 1, "each job was done, and none twice"
        print("flights by carrier:", carriers.most_common(3))

        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            channel = connection.channel()
            _, properties, job = channel.basic_get(FAILED, auto_ack=True)
            [death] = properties.headers["x-death"]
            print(
                f"failed: {job!r}, {death['reason']} from {'the queue' if death['queue'] == QUEUE else death['queue']}"
            )
            for queue in (QUEUE, FAILED):
                channel.queue_delete(queue)


if __name__ == "__main__":
    main(spool_of(__doc__))
