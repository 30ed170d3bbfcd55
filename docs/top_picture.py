"""Draws the picture of `qflow top` in docs/howto/top.md, from a spool of its own: `python docs/top_picture.py`."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

import attrs

import qflow
from qflow import doctor
from qflow.top.app import Source, Top
from qflow.web.reading import health

PICTURE = Path(__file__).parent / "howto" / "top.svg"
SIZE = (120, 22)
SECONDS = 40
LOOK_S = 0.6
"""What changed is figured anew twice a second."""
NAME = "/var/lib/shop/spool"


class Steady:
    """A clock that goes one second with each look, so that curves do not depend on how fast this runs."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def work(broker: qflow.Broker, second: int) -> None:
    """Do what a program with this spool does in a second."""
    rate = 20 + second * 7 % 23
    broker.queue("orders").put_many([b"order" * 20] * rate)
    batch = broker.queue("orders").get_many(rate - 2, timeout_s=0)
    batch.ack()
    broker.queue("thumbnails").put_many([bytes(20_000)] * (second % 5))
    if second > SECONDS // 2:
        broker.queue("payments").put_many([b"payment" * 30] * (second % 9))
    for _ in range(30 + second % 11):
        broker.publish("clicks/shop", b"click")


async def draw(path: Path) -> str:
    """Return the picture of a spool that was looked at for a while."""
    with qflow.open(path, capacity_bytes="2MiB") as broker:
        for name in ("orders", "thumbnails", "dead"):
            broker.declare_queue(name)
        payments = broker.declare_queue("payments", limit_messages=80, on_overflow=qflow.Overflow.DROP_OLDEST)
        payments.put(b"the first")
        held = payments.get()
        broker.declare_stream("clicks", topics=["clicks/#"])
        inside = doctor.seen_in(str(path), health(str(path)))  # as another process sees it
        clock = Steady()
        source = Source(path, clock)
        top = Top(source, watches=False)
        async with top.run_test(size=SIZE) as pilot:
            for second in range(SECONDS):
                work(broker, second)
                await asyncio.sleep(LOOK_S)
                clock.now_s = float(second)
                top.take(attrs.evolve(source.look(), inside=inside))
            await pilot.pause()
            picture = top.export_screenshot(title="qflow top spool")
        held.ack()
        source.leave()
    # The names of the directory and of the process are others each time.
    shown = NAME + "&#160;" * (len(str(path)) - len(NAME))
    return re.sub(r"pid(&#160;)\d+", r"pid\g<1>4711", picture).replace(str(path), shown)


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="shop-") as directory:
        picture = asyncio.run(draw(Path(directory) / "spool"))
    PICTURE.write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n")


if __name__ == "__main__":
    main()
