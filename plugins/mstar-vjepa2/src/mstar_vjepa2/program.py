"""Programs of both V-JEPA 2 models. Driven by the conductor."""

from __future__ import annotations

from typing import Any, Final

from mstar_core.plugin import ProgramRequest, Run
from mstar_core.plugin.program import ProgramGenerator
from mstar_vjepa2.params import FEW_CANDIDATES

MASKS: Final = ("context_mask", "target_mask")
GOALS: Final = ("goal_frame", "goal_latents")
CLIP: Final = "pixel_values_videos"

EARLIER: Final = "video"
"""Modality under which an earlier system sent latents. Requests for it receive latents in that form."""

Named = dict[str, Any]
"""Inputs of a Run by name. Any, because a type checker matches ** against the Run's own options too."""


def vjepa2(request: ProgramRequest) -> ProgramGenerator:
    """Run one walk: encode, classify, predict, or roll out step by step."""
    params = request.params
    match params.chosen_task(request.outputs):
        case "predict":
            yield Run(_sent(request, "predict"), **_inputs_of(request, CLIP, *MASKS))
        case "rollout":
            yield Run(_sent(request, "rollout"), max_iters=params.steps, **_inputs_of(request, CLIP, *MASKS))
        case "classify":
            yield Run("classify", **_inputs_of(request, CLIP))
        case _ if params.pooling == "attentive":
            yield Run("classify", **_inputs_of(request, CLIP))
        case _:
            yield Run(_sent(request, "encode"), **_inputs_of(request, CLIP, "layers"))


def vjepa2_ac(request: ProgramRequest) -> ProgramGenerator:
    """Encode, predict each next frame, roll out candidates, or plan."""
    params = request.params
    match params.chosen_task(request.outputs):
        case "encode":
            yield Run(_sent(request, "encode"), **_inputs_of(request, CLIP))
        case "predict":
            frames = len(request.inputs[CLIP])
            yield Run(
                _sent(request, "predict"),
                max_iters=frames,
                sample=False,
                **_inputs_of(request, CLIP, "given_actions", "given_states", "given_extrinsics"),
            )
        case "plan":
            yield [*_context(request), _plan(request)]
        case _:
            yield [*_context(request), _rollout(request)]


def _sent(request: ProgramRequest, walk: str) -> str:
    """Return the variant of a walk that sends latents as the requested modality."""
    return f"{walk}_video" if EARLIER in request.outputs else walk


def _inputs_of(request: ProgramRequest, *names: str) -> Named:
    return {name: request.inputs[name] for name in names if name in request.inputs}


def _context(request: ProgramRequest) -> list[Run]:
    """Read the context frames before the last one. All candidates share them."""
    earlier = request.params.context_frames - 1
    if earlier == 0:
        return []
    inputs = request.inputs
    named = {"given_actions": "past_actions", "given_states": "past_states", "given_extrinsics": "past_extrinsics"}
    known: Named = {port: inputs[name] for port, name in named.items() if name in inputs}
    return [Run("prefill_context", max_iters=earlier, sample=False, pixel_values_videos=inputs["context"], **known)]


def _rollout(request: ProgramRequest) -> Run:
    params = request.params
    inputs = _inputs_of(request, CLIP, "state", "states", "actions", "extrinsics", *GOALS)
    walk = _rollout_walk(request)
    # The scorer runs between the steps of a scored rollout, so all candidates keep their caches.
    kept = params.steps if "scored" in walk or walk == "rollout_energies" else 0
    return Run(walk, max_iters=params.steps, rows=params.candidates, row_passes=kept, sample=False, **inputs)


def _rollout_walk(request: ProgramRequest) -> str:
    """Return the variant that sends only the requested outputs, because latents are large."""
    params = request.params
    is_scored = any(name in request.inputs for name in GOALS)
    name = "rollout_scored" if is_scored else "rollout"
    if EARLIER in request.outputs:
        return _sent(request, name)
    spares = is_scored and params.candidates > FEW_CANDIDATES
    outputs = params.returns or (("energies",) if spares else ("latents",))
    if is_scored and not {"latents", "final_only"} & set(outputs):
        return "rollout_energies"
    return f"{name}_final" if "final_only" in outputs else name


def _plan(request: ProgramRequest) -> Run:
    params = request.params
    limits = {"cem_loop": params.cem_steps, "rollout_loop": params.plan_steps}
    names = ("mean", "std", "noise", "fixed_axes", "close_from", "state", "extrinsics", *GOALS)
    walk = "plan_told" if "energies" in (params.returns or ()) else "plan"
    return Run(walk, max_iters=limits, rows=params.samples, sample=False, **_inputs_of(request, CLIP, *names))
