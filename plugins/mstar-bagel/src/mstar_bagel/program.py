"""Program of a BAGEL request: prompt, thought or answer, then the image. Run by the conductor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mstar_bagel.params import guidance
from mstar_core.graph import MAIN
from mstar_core.plugin import Fork, ProgramRequest, Run, Segment
from mstar_core.plugin.program import ProgramGenerator

CFG_TEXT: Final = "cfg_text"
CFG_IMG: Final = "cfg_img"
SYSTEM: Final = "system"
"""Kind of a think instruction. It is not user text, so it never starts a new text-free branch."""
IMAGE: Final = "image"

GUIDED: Final = "times_guided"
PHASES: Final = ("times_before", GUIDED, "times_after")
"""Request inputs with the flow times of an image, in order: those before, inside and after the guidance interval.

A phase without steps is absent. Only the guided phase runs the branches of guidance.
"""

MOST_PARTIAL: Final = 3
"""Most partial images of a request."""


def until_partial(phase: str, number: int) -> str:
    """Return the input with the flow times of a phase up to a partial image; the phase's own input has the rest."""
    return f"{phase}_{number}"


def bagel(request: ProgramRequest) -> ProgramGenerator:
    """Run prompt segments in order, then text, then the image. A request has at most one image."""
    if not request.generates_image:
        yield list(_answer(request))
        return
    branches = image_branches(request)
    reading: list[Run] = []
    for segment in request.segments:
        if CFG_TEXT in branches and segment.is_last and segment.is_text and reading:
            # cfg_text lacks only the last user text. If that is the whole prompt, the branch stays empty.
            yield reading
            yield Fork(MAIN, into=CFG_TEXT)
            reading = []
        reading += _reads(request, segment, branches)
    if reading:
        yield reading
    if CFG_TEXT in branches and request.segments[-1].kind == IMAGE:
        yield Fork(MAIN, into=CFG_TEXT)
    if request.params.think_mode:
        yield from _think(request)
    yield from _paint(request, branches)


def image_branches(request: ProgramRequest) -> tuple[str, ...]:
    """Return the cache branches that the guided steps of the image need.

    Without input image and thought, cfg_img equals main, so no third pass runs and main's velocity is used.
    """
    if not request.generates_image or not any(name.startswith(GUIDED) for name in request.inputs):
        return (MAIN,)
    is_edit = any(segment.kind == IMAGE for segment in request.segments)
    differs = is_edit or request.params.think_mode
    scale = guidance(request.params, is_edit=is_edit).image_scale
    return (MAIN, CFG_TEXT, CFG_IMG) if scale > 1 and differs else (MAIN, CFG_TEXT)


def _reads(request: ProgramRequest, segment: Segment, branches: tuple[str, ...]) -> Iterator[Run]:
    if segment.kind == IMAGE:
        if request.generates_image:
            yield Run("prefill_vae", image=segment.inputs["vae_image"], sample=False)
        yield Run("prefill_vit", image=segment.inputs["vit_image"], sample=False)
    else:
        texts = tuple(branch for branch in branches if branch != CFG_TEXT)
        yield Run("prefill_text", tokens=segment.inputs["tokens"], branches=texts, sample=False)


def _answer(request: ProgramRequest) -> Iterator[Run]:
    """Yield the runs of an answer in text, in one list: its start depends on nothing that the conductor decides.

    The last segment is text and ends with the start id, so the pass over it draws the first id of the answer.
    """
    *segments, last = request.segments
    for segment in segments:
        yield from _reads(request, segment, (MAIN,))
    yield Run("prefill_last", tokens=last.inputs["tokens"])
    yield Run("decode", max_iters=request.params.max_output_tokens - 1)


def _think(request: ProgramRequest) -> ProgramGenerator:
    """Decode a thought from the start id, before the image, and close it in the cache of main only."""
    limit = request.params.max_think_tokens
    thought = yield Run("decode", token=request.inputs["start"], max_iters=limit, keep=("token",))
    closing = [Run("prefill_text", tokens=request.inputs["end"], sample=False)]
    if thought.reason == "length":
        # The last id is not in the cache yet. After a stop it is the end id, which the cache lacks as well.
        closing.insert(0, Run("prefill_text", tokens=thought.signals["token"], sample=False))
    yield closing


def _paint(request: ProgramRequest, branches: tuple[str, ...]) -> ProgramGenerator:
    """Denoise in runs of one loop: one for each phase, so that steps outside the guidance interval run main alone.

    A partial image ends a run. Each run starts from the last latents.
    """
    inputs = request.inputs
    yield Run("first_noise", grid=inputs["grid"])
    runs = [(phase, name) for phase in PHASES for name in _parts(phase) if name in inputs]
    for phase, name in runs:
        walk = "image_gen" if name == runs[-1][1] else "denoise" if name == phase else "partial_image"
        yield Run(
            walk,
            guidance=inputs["guidance"],
            times=inputs[name],
            max_iters=len(inputs[name]),
            branches=branches if phase == GUIDED else (MAIN,),
            sample=False,
        )


def _parts(phase: str) -> Iterator[str]:
    """Yield the inputs that may hold flow times of a phase, in order."""
    yield from (until_partial(phase, number) for number in range(MOST_PARTIAL))
    yield phase
