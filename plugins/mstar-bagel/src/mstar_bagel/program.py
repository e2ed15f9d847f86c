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


def bagel(request: ProgramRequest) -> ProgramGenerator:
    """Run prompt segments in order, then text, then the image. A request has at most one image."""
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
    if request.params.think_mode or not request.generates_image:
        yield from _write(request)
    if request.generates_image:
        inputs = request.inputs
        steps = request.params.num_timesteps - 1
        yield Run("image_gen", latents=inputs["noise"], guidance=inputs["guidance"], max_iters=steps, branches=branches)


def image_branches(request: ProgramRequest) -> tuple[str, ...]:
    """Return the cache branches that the image needs.

    Without input image and thought, cfg_img equals main, so no third pass runs and main's velocity is used.
    """
    if not request.generates_image:
        return (MAIN,)
    is_edit = any(segment.kind == IMAGE for segment in request.segments)
    guide = guidance(request.params, is_edit=is_edit)
    if not guide.is_on:
        return (MAIN,)
    differs = is_edit or request.params.think_mode
    return (MAIN, CFG_TEXT, CFG_IMG) if guide.image_scale > 1 and differs else (MAIN, CFG_TEXT)


def _reads(request: ProgramRequest, segment: Segment, branches: tuple[str, ...]) -> Iterator[Run]:
    if segment.kind == IMAGE:
        if request.generates_image:
            yield Run("prefill_vae", image=segment.inputs["vae_image"], sample=False)
        yield Run("prefill_vit", image=segment.inputs["vit_image"], sample=False)
    else:
        texts = tuple(branch for branch in branches if branch != CFG_TEXT)
        yield Run("prefill_text", tokens=segment.inputs["tokens"], branches=texts, sample=False)


def _write(request: ProgramRequest) -> ProgramGenerator:
    """Decode from the explicit start id. A thought before an image is closed in the cache of main only."""
    params = request.params
    limit = params.max_think_tokens if request.generates_image else params.max_output_tokens
    keep = ("token",) if request.generates_image else ()
    thought = yield Run("decode", token=request.inputs["start"], max_iters=limit, keep=keep)
    if not request.generates_image:
        return
    closing = [Run("prefill_text", tokens=request.inputs["end"], sample=False)]
    if thought.reason == "length":
        # The last id is not in the cache yet. After a stop it is the end id, which the cache lacks as well.
        closing.insert(0, Run("prefill_text", tokens=thought.signals["token"], sample=False))
    yield closing
