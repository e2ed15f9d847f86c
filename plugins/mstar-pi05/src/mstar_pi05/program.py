"""Program of Pi0.5: prefill cameras and prompt, then run the flow from noise to actions. Driven by the conductor."""

from __future__ import annotations

from mstar_core.plugin import ProgramRequest, Run
from mstar_core.plugin.program import ProgramGenerator


def pi05(request: ProgramRequest) -> ProgramGenerator:
    """Send both walks in one message, so that the conductor is not involved between them."""
    inputs = request.inputs
    yield [
        Run("prefill", images=inputs["images"], tokens=inputs["tokens"], sample=False),
        Run(
            "action_gen",
            actions=inputs["noise"],
            scale=inputs["scale"],
            offset=inputs["offset"],
            max_iters=request.params.num_steps,
            finishes=True,
        ),
    ]
