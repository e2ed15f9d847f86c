"""First use of what a GPU does lazily: kernels load and choose their plans at the first call. Run before `ready`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mstar_core.engine.base import Handle, Job, JobKey, SamplingParams
from mstar_core.engine.kv.inputs import id_port

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.engine.base import NodeRunner
    from mstar_core.graph import NodeSpec

TOKENS = 8
NOBODY = Handle(-1)
"""A handle that no request has."""


def warm_module(module: nn.Module) -> None:
    """Let a stateless module run what it will run (`warm_up`), where it offers that."""
    prepare = getattr(module, "warm_up", None)
    if callable(prepare):
        with torch.inference_mode():
            prepare()
        torch.cuda.synchronize()


def warm_prefill(runner: NodeRunner, node: NodeSpec) -> None:
    """One short prompt through a node that samples ids; nothing of it stays."""
    if node.sampling is None:
        return
    sampling = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)
    runner.open(NOBODY, sampling, TOKENS + 1)
    inputs = {id_port(node): torch.zeros(TOKENS, dtype=torch.int64)}
    runner.submit(Job(key=JobKey(-1), handle=NOBODY, inputs=inputs, outputs=(node.sampling.port,)))
    running = runner.launch()
    if running is not None:
        result = runner.collect(running)
        for failed in result.failed:
            raise failed.error
    runner.close(NOBODY)
