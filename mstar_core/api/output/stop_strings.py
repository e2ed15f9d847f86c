"""Stop strings: found in text that comes in pieces, however it is cut. One matcher per answer, of its presenter."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text goes in by `push`, and comes out as soon as no stop string can begin in it any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_matched = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that may be shown now. After a match there is none: not the stop string, nothing behind it."""
        if self.is_matched:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_matched = True
            self._held = ""
            _, at = min(found)  # the one that is complete first, so that how the text is cut makes no difference
            return text[:at]
        keep = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` may begin `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
