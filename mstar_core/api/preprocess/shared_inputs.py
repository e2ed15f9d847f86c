"""What the processor makes of a prompt that several items of a request share. Owned by their group."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from mstar_core.plugin.processor import Inputs, PromptRequest

Read = Callable[[PromptRequest], Awaitable[Inputs]]


class SharedInputs:
    """Reads the prompt once, for the first item that asks; each item gets it with its own seed."""

    def __init__(self) -> None:
        self._read: asyncio.Future[Inputs] | None = None

    async def of(self, prompt: PromptRequest, read: Read) -> Inputs:
        """The inputs of an item. Raises for each item what reading raised."""
        if self._read is None:
            self._read = asyncio.ensure_future(read(prompt))
            self._read.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen: all may have gone
        inputs = await asyncio.shield(self._read)
        if inputs.params is None or not hasattr(inputs.params, "seed"):
            return inputs
        return dataclasses.replace(inputs, params=dataclasses.replace(inputs.params, seed=prompt.seed))

    def close(self) -> None:
        """Nobody waits any more: reading that has not begun will not."""
        if self._read is not None:
            self._read.cancel()
