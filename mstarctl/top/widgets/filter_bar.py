"""Input line of the filter. It applies while typing; escape restores the previous text."""

from __future__ import annotations

from textual import events
from textual.message import Message
from textual.widgets import Input

EXAMPLES = "state:queue  node:talker  ttft>500  speech  /r-7f[0-9]/"


class FilterBar(Input):
    """Hidden until opened. Owned by the app, which validates the text."""

    class Typed(Message):
        """The current text. is_final: enter was pressed; the bar closes if the text is valid."""

        def __init__(self, text: str, *, is_final: bool) -> None:
            super().__init__()
            self.text, self.is_final = text, is_final

    class Left(Message):
        """Escape was pressed. text: the previous one, to restore."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        super().__init__(id="filter", placeholder=EXAMPLES, compact=True, select_on_focus=False)
        self._before = ""

    def open(self, text: str) -> None:
        """Show the bar with an initial text."""
        self.value = self._before = text
        self.cursor_position = len(text)
        self.display = True
        self.focus()

    def close(self) -> None:
        """Hide the bar."""
        self.display = False

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self.post_message(self.Typed(event.value, is_final=False))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Typed(event.value, is_final=True))

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self.post_message(self.Left(self._before))
            return
        await super()._on_key(event)
