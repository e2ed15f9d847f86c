"""Prompt ids and media as segments: text and media in order, with positions and the talker's share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import RequestError
from mstar_core.plugin.processor import SegmentInputs
from mstar_qwen3omni.checkpoint.config import TextIds
from mstar_qwen3omni.program import TALKER_POSITIONS, TALKER_TOKENS
from mstar_qwen3omni.request.media import Media
from mstar_qwen3omni.request.positions import PositionCounter

if TYPE_CHECKING:
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

OPENING: Final = 3
"""Ids of `<|im_start|>assistant` and a line break, which open the answer. The talker reads them too."""


@dataclass(slots=True)
class Segments:
    """Segments of a prompt. talker_tokens: ids and pads that the talker reads."""

    inputs: list[SegmentInputs] = field(default_factory=list)
    talker_tokens: int = 0


def split(ids: Indices, media: Sequence[Media], special: TextIds, *, is_spoken: bool) -> Segments:
    """Split a prompt at its media.

    ids: all ids, int64 [n]; the pads of media number k are `media[k].tokens`. is_spoken: the talker runs too, so its
    share is added. Raises RequestError (prompt_token_ids) if pads and media differ or the prompt does not end with the
    start of an answer.
    """
    is_heard = _talker_share(ids, special)
    thinker, talker = PositionCounter(), PositionCounter()
    segments = Segments()
    at = 0
    for start, end, medium in _matched(ids, media, special):
        _add_text(segments, ids[at:start], is_heard[at:start] if is_spoken else None, thinker, talker)
        if not is_heard[start]:
            raise RequestError(
                "prompt_token_ids has media outside of user turns",
                f"at id {start}",
                "move them to a user turn",
                field="prompt_token_ids",
            )
        for part in medium.windows or (medium,):
            _add_medium(segments, part, thinker, talker if is_spoken else None)
        at = end
    _add_text(segments, ids[at:], is_heard[at:] if is_spoken else None, thinker, talker)
    return segments


def plain_text(ids: Indices, special: TextIds) -> Segments:
    """Return the segment of a raw prompt, int64 [n]. Raises RequestError for pads of media, of which it has none."""
    if pad_runs(ids, special):
        raise RequestError(
            "a raw prompt cannot have media", hint="send them in the messages of a chat request", field="ids"
        )
    segments = Segments()
    _add_text(segments, ids, None, PositionCounter(), PositionCounter())
    return segments


def _talker_share(ids: Indices, special: TextIds) -> Mask:
    """Return where the talker reads: user turns and the start of the answer, but no system turn or earlier answer."""
    starts = np.flatnonzero(ids == special.im_start)
    if not len(starts) or len(ids) < starts[-1] + OPENING or ids[starts[-1] + 1] != special.assistant:
        raise RequestError(
            "the prompt does not end with the start of an answer",
            hint="end it with <|im_start|>assistant and a line break",
            field="prompt_token_ids",
        )
    is_heard = np.zeros(len(ids), dtype=np.bool_)
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        is_heard[start:end] = start + 1 < len(ids) and ids[start + 1] == special.user
    is_heard[starts[-1] : starts[-1] + OPENING] = True
    return is_heard


def _matched(ids: Indices, media: Sequence[Media], special: TextIds) -> list[tuple[int, int, Media]]:
    """Return start, end and medium of each run of pads. Raises RequestError if they do not match."""
    runs = pad_runs(ids, special)
    if len(runs) != len(media):
        raise RequestError(
            f"prompt_token_ids has {len(runs)} runs of pads and the request {len(media)} media",
            hint="send the tensors of every run, in order",
            field="prompt_token_ids",
        )
    for (start, end), medium in zip(runs, media, strict=True):
        if not np.array_equal(ids[start:end], medium.tokens):
            raise RequestError(
                f"the pads at id {start} of prompt_token_ids do not fit their {medium.kind}",
                f"{end - start} pads, the tensors make {len(medium.tokens)}",
                "send one pad per token, in order",
                field="prompt_token_ids",
            )
    return [(start, end, medium) for (start, end), medium in zip(runs, media, strict=True)]


def pad_runs(ids: Indices, special: TextIds) -> list[tuple[int, int]]:
    """Return start and end of each run of pads. Runs of different media have markers between them."""
    is_pad = np.isin(ids, (special.image_pad, special.video_pad, special.audio_pad))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_pad, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _add_text(
    segments: Segments, ids: Indices, is_heard: Mask | None, thinker: PositionCounter, talker: PositionCounter
) -> None:
    """Add the text before, between or after media, if there is any. is_heard: None for an answer without speech."""
    if not len(ids):
        return
    arrays: dict[str, Any] = {"tokens": ids}
    positions = thinker.run(len(ids))
    if positions is not None:
        arrays["positions"] = positions
    heard = ids[is_heard] if is_heard is not None else ids[:0]
    if len(heard):
        arrays[TALKER_TOKENS] = heard
        talker.run(len(heard))
        segments.talker_tokens += len(heard)
    segments.inputs.append(SegmentInputs(kind="text", arrays=arrays, length=len(ids)))


def _add_medium(segments: Segments, medium: Media, thinker: PositionCounter, talker: PositionCounter | None) -> None:
    arrays: dict[str, Any] = {"tokens": medium.tokens, **medium.arrays}
    positions = medium.place(thinker)
    if positions is not None:
        arrays["positions"] = positions
    if talker is not None:
        places = medium.place_for_talker(talker)
        if places is not None:
            arrays[TALKER_POSITIONS] = places
        segments.talker_tokens += len(medium.tokens)
    length = len(medium.tokens)
    segments.inputs.append(
        SegmentInputs(kind=medium.kind, arrays=arrays, length=length, counts=medium.counts, content=medium.content)
    )
