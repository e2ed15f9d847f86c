"""Rules of Whisper's ids: which may follow what a window has written so far. Applied to logits before a draw.

What a rule reads are the marks of a sequence, int64 [MARKS]: ids written, the last id, the one before, the last
timestamp (0: none), the form: 1 with timestamps, 0 without, -1 for a draw without rules, such as that of the language;
then the end of a prompt, whose ids are drawn instead of read. Below zero, the ids written count the rest of them.
Source: section 4.5 of the paper on Whisper, and the logits processors of `transformers`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import pad

from mstar_whisper.checkpoint.config import HEAD

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_whisper.checkpoint.config import TokenIds

MARKS: Final = 5 + HEAD
FORM: Final = 4
"""Place of the form among the marks."""

NEVER: Final = float("-inf")


class Rules:
    """The rules of one checkpoint."""

    def __init__(self, ids: TokenIds, vocab: int) -> None:
        self._ids = ids
        self._vocab = vocab
        self._on: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._bits: dict[torch.device, Tensor] = {}

    def of_prompt(self, tokens: Tensor) -> Tensor:
        """Return the marks behind each token of a prompt, [T, MARKS]. Only those of the last one count."""
        marks = tokens.new_zeros(len(tokens), MARKS)
        marks[:, 4] = (tokens != self._ids.no_times).long()
        if self._ids.languages:
            marks[:, 4].masked_fill_(tokens == self._ids.start, -1)
        return marks

    def after(self, marks: Tensor, token: Tensor) -> Tensor:
        """Return the marks after one more id. marks: [n, MARKS]; token: int64 [n]."""
        if marks.is_cuda:
            after: Tensor = _kernels().after(marks, token, self._ids.first_time)
            return after
        written, last, _, time, form, *head = marks.unbind(-1)
        is_text = written >= 0
        token = torch.where(is_text, token, 0)
        return torch.stack([written + 1, token, last, self._time(token, time), form, *head], dim=-1)

    def of_written(self, ids: Tensor, item: Tensor, place: Tensor, form: Tensor) -> Tensor:
        """Return the marks before each id of packed texts, [T, MARKS].

        ids: int64 [T], prompts included. item: of each, ascending. place: in its text, negative in its prompt. form:
        see above.
        """
        is_time = (ids >= self._ids.first_time) & (place >= 0)
        # The largest timestamp so far of the same text: items are kept apart by an offset.
        times = (torch.where(is_time, ids, 0) + item * self._vocab).cummax(0).values - item * self._vocab
        last, before, time = (_shifted(values, shift) for values, shift in ((ids, 1), (ids, 2), (times, 1)))
        last, before, time = last * (place > 0), before * (place > 1), time * (place > 0)
        return pad(torch.stack([place.clamp(min=0), last, before, time, form], dim=-1), (0, HEAD))

    def constrained(self, logits: Tensor, marks: Tensor) -> Tensor:
        """Return logits without forbidden ids, [n, vocab]: the same ones, changed, on CUDA, elsewhere float32.

        logits: [n, vocab] of any float type, rows contiguous.
        """
        if logits.is_cuda:
            kernels, device = _kernels(), logits.device
            if device not in self._bits:
                self._bits[device] = kernels.table_of(self._ids, self._vocab).to(device)
            kernels.constrain(logits, marks, self._bits[device], self._ids, FORM)
            return logits
        return self.constrained_plainly(logits, marks)

    def constrained_plainly(self, logits: Tensor, marks: Tensor) -> Tensor:
        """Do the same by plain operations, in float32: the reference of the kernels."""
        logits, first = logits.float(), self._ids.first_time
        written, last, before, time, form, *_ = (part[:, None] for part in marks.unbind(-1))
        number, never, never_first = self._tables(logits.device)
        is_head = written < 0
        head = marks[:, 5:].gather(-1, (HEAD + written).clamp(0, HEAD - 1))
        logits = logits.masked_fill(is_head & (number != head), NEVER)
        form = form.masked_fill(is_head, -1)
        forbidden = (never & (form >= 0)) | (never_first & (written == 0) & (form >= 0))
        logits = logits.masked_fill(forbidden, NEVER)
        is_time = number >= first
        ends_time, begins_time = (written > 0) & (last >= first), (written < 2) | (before >= first)
        # Timestamps come in pairs except before the end, and never decrease.
        rest = (number == self._ids.no_times) | (is_time & ends_time & begins_time)
        rest |= (number < self._ids.end) & ends_time & ~begins_time
        lowest = torch.where(time > 0, time + (~(ends_time & ~begins_time)).long(), first)
        rest |= is_time & (number < lowest)
        is_first = written == 0
        rest |= ~is_time & is_first
        if self._ids.most_first_time is not None:
            rest |= (number > first + self._ids.most_first_time) & is_first
        is_timed = form > 0
        logits = logits.masked_fill(rest & is_timed, NEVER)
        # If all timestamps together are likelier than any text, one of them is next.
        scores = logits.log_softmax(-1)
        takes_time = scores[:, first:].logsumexp(-1) > scores[:, :first].amax(-1)
        return logits.masked_fill(~is_time & takes_time[:, None] & is_timed, NEVER)

    def _time(self, token: Tensor, time: Tensor) -> Tensor:
        return torch.where(token >= self._ids.first_time, token, time)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return all ids, those never drawn and those not drawn first, [1, vocab] each. Made once per device."""
        if device not in self._on:
            never, never_first = (torch.zeros(1, self._vocab, dtype=torch.bool) for _ in range(2))
            never[0, list(self._ids.suppress)] = True
            never_first[0, list(self._ids.suppress_first)] = True
            number = torch.arange(self._vocab)[None]
            self._on[device] = number.to(device), never.to(device), never_first.to(device)
        return self._on[device]


def _shifted(values: Tensor, by: int) -> Tensor:
    """Return values moved towards the end, zeros before them. values: [T]."""
    return torch.cat([values.new_zeros(by), values])[: len(values)]


def _kernels() -> ModuleType:
    """Import the kernels. They need triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_whisper.nodes.rules_kernel")
