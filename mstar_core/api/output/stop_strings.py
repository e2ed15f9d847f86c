"""Stop strings: incremental matching in streamed text, independent of chunk borders. Owned by the output encoder."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Matcher that holds text back while it may be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_matched = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that can be sent now. After a match it is empty."""
        if self.is_matched:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_matched = True
            self._held = ""
            _, at = min(found)  # the match that is complete first, so that the result does not depend on chunk borders
            return text[:at]
        keep = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the start of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
