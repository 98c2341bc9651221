"""Work that has been issued and lands later."""

from __future__ import annotations

from collections.abc import Callable


class InFlight:
    """An asynchronous operation that has been issued; ``complete`` performs it, once."""

    __slots__ = ("action", "finished", "text")

    def __init__(self, action: Callable[[], None], text: str) -> None:
        self.action, self.text, self.finished = action, text, False

    def complete(self) -> None:
        """Performs it, unless that has been done."""
        if not self.finished:
            self.finished = True
            self.action()
