"""Inputs shared by the items of one request, which have the same prompt. Owned by their group."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from mstar_core.plugin.processor import Inputs, PromptRequest

Read = Callable[[PromptRequest], Awaitable[Inputs]]


class SharedInputs:
    """Processes the prompt once, for the first item; each item gets the result with its own seed."""

    def __init__(self) -> None:
        self._read: asyncio.Future[Inputs] | None = None

    async def of(self, prompt: PromptRequest, read: Read) -> Inputs:
        """Return the inputs of an item. Raises the error of processing for every item."""
        if self._read is None:
            self._read = asyncio.ensure_future(read(prompt))
            self._read.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # marks the error as retrieved: all items may be gone
        inputs = await asyncio.shield(self._read)
        if inputs.params is None or not hasattr(inputs.params, "seed"):
            return inputs
        return dataclasses.replace(inputs, params=dataclasses.replace(inputs.params, seed=prompt.seed))

    def close(self) -> None:
        """Cancel processing that has not begun."""
        if self._read is not None:
            self._read.cancel()
