"""What a Pi0.5 request does: read cameras and prompt, then flow from noise to actions. Driven by the conductor."""

from __future__ import annotations

from mstar_core.plugin import ProgramRequest, Run
from mstar_core.plugin.program import ProgramGenerator


def pi05(request: ProgramRequest) -> ProgramGenerator:
    """Both walks in one message; no visit between them, and none before the client has its actions."""
    inputs = request.inputs
    yield [
        Run("prefill", images=inputs["images"], tokens=inputs["tokens"], sample=False),
        Run(
            "action_gen", actions=inputs["noise"], scale=inputs["scale"], offset=inputs["offset"],
            max_iters=request.params.num_steps, finishes=True,
        ),
    ]  # fmt: skip
