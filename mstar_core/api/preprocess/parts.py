"""Inputs of a request in parts: processed once, and divided among the items that run them. Owned by their group."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mstar_core.api.preprocess.pool import Read, SharedInputs
from mstar_core.plugin.processor import Inputs, PromptRequest


class PartInputs:
    """Inputs of all parts. count: how many there are, once the prompt is processed: at least one."""

    def __init__(self) -> None:
        self.count: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._shared = SharedInputs()

    def item(self, index: int) -> ItemInputs:
        """Return the inputs of an item."""
        return ItemInputs(self, index)

    async def of(self, index: int, prompt: PromptRequest, read: Read) -> Inputs:
        """Return the inputs of a part. Raises the error of processing."""
        inputs = await self._shared.of(prompt, read)
        if not self.count.done():
            self.count.set_result(max(1, len(inputs.parts)))
        return inputs.part(index)

    def close(self) -> None:
        """Cancel processing that has not begun."""
        self._shared.close()


@dataclass(frozen=True, slots=True)
class ItemInputs:
    """Inputs of one part."""

    parts: PartInputs
    index: int

    async def of(self, prompt: PromptRequest, read: Read) -> Inputs:
        """See InputSource."""
        return await self.parts.of(self.index, prompt, read)
