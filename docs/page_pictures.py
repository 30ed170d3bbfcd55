"""Takes the pictures of the page in docs/howto/page.md, of the incident of the runbook: `python docs/page_pictures.py`.

It needs the extras `serve` and `metrics`, playwright, pillow, and a Chromium on the PATH.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import qflow

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import incident  # noqa: E402
import web_served  # noqa: E402

PICTURES = Path(__file__).parent / "howto"
NAME, OWNER, MAILER = "/var/lib/shop/spool", 4242, 4711
"""What is shown for the directory and the processes, which are others each time."""
LOOKS = 12
COLOURS = 128
RENAME = """
names => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode())
    for (const [is, shown] of names) walk.currentNode.data = walk.currentNode.data.replaceAll(is, shown);
}
"""
SHOTS = (
    ("page-overview", "/", "#findings", (1100, 1010), "light"),
    ("page-letters", "/messages?queue=dead&most=2", "article", (1100, 560), "dark"),
    ("page-phone", "/queue?queue=mail", "#findings", (390, 760), "light"),
)
"""A picture: its name, what it shows, what must be there, its size, and the colours."""


def work(broker: qflow.RemoteBroker, happening: incident.Incident, number: int) -> None:
    """Do what a program does in between, so that there is something to see in the charts."""
    orders = broker.queue("orders")
    orders.put_many([b"an order"] * (10 + number * 7 % 13))
    orders.get_many(20, timeout_s=0).ack()
    happening.let_pass(0.5)


def shot(tab: Any, path: Path, names: list[tuple[str, str]]) -> None:
    """Take a picture with few colours, which is a third as large."""
    tab.evaluate(RENAME, names)
    picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def main() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="shop-") as directory,
        incident.made(Path(directory) / "spool", "http") as happening,
        qflow.connect(happening.spool) as broker,
        sync_playwright() as driver,
    ):
        home = f"http://127.0.0.1:{happening.ports[0]}"
        names = [(str(happening.spool), NAME), (str(happening.owner), str(OWNER)), (str(happening.mailer), str(MAILER))]
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, page, needed, (width, height), scheme in SHOTS:
            tab = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab.goto(f"{home}/login")
            tab.fill("[name=name]", "anna")
            tab.fill("[name=password]", web_served.PASSWORD)
            tab.keyboard.press("Enter")
            tab.wait_for_selector("[data-chart=rates] canvas")
            if page == "/":
                for number in range(LOOKS):
                    points = tab.get_attribute("[data-chart=rates]", "data-points")
                    work(broker, happening, number)
                    tab.wait_for_selector(f"[data-chart=rates]:not([data-points='{points}'])")
                tab.wait_for_selector("text=commonest reason")
            else:
                tab.goto(f"{home}{page}")
            tab.wait_for_selector(needed)
            shot(tab, PICTURES / f"{name}.png", names)
        chromium.close()


if __name__ == "__main__":
    main()
