"""What is typed, as Textual reads it from a terminal."""

from __future__ import annotations

from textual.drivers.linux_driver import LinuxDriver


class Terminal(LinuxDriver):
    """Passes over what is no UTF-8, such as an umlaut of a terminal that writes Latin-1."""

    def run_input_thread(self) -> None:
        """Read keys until the end. What came in one piece with such a byte is lost with it."""
        while True:
            try:
                return super().run_input_thread()
            except UnicodeDecodeError:
                continue
