"""The line where a filter is typed. It works as one types; escape brings back the text before."""

from __future__ import annotations

from textual import events
from textual.message import Message
from textual.widgets import Input

EXAMPLES = "state:queue  node:talker  ttft>500  speech  /r-7f[0-9]/"


class FilterBar(Input):
    """Hidden until it is opened. Owned by the app, which says whether a text can be used."""

    class Typed(Message):
        """The text now. is_final: enter was pressed, the bar closes if the text can be used."""

        def __init__(self, text: str, *, is_final: bool) -> None:
            super().__init__()
            self.text, self.is_final = text, is_final

    class Left(Message):
        """Escape: the text before counts again."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        super().__init__(id="filter", placeholder=EXAMPLES, compact=True, select_on_focus=False)
        self._before = ""

    def open(self, text: str) -> None:
        """Show it with a text to begin with."""
        self.value = self._before = text
        self.cursor_position = len(text)
        self.display = True
        self.focus()

    def close(self) -> None:
        """Hide it."""
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
