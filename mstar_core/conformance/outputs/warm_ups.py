"""Bronze check: the warm-up of nodes runs on the CPU, with inputs as their ports declare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mstar_core.conformance.clock import FakeClock
from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.conformance.nodes import RuntimeSettings, make_runners
from mstar_core.conformance.runtime import one_thread
from mstar_core.engine.module import node_module
from mstar_core.engine.warmup import run_warmup
from mstar_core.errors import MstarError, PluginError
from mstar_core.plugin.conformance import Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mstar_core.engine.module import WarmupRequest

WAY_OUT: Final = "correct warm_up or warmup_requests: on a GPU a deployment runs both before it is ready"


def warm_ups_run(subject: Subject) -> None:
    """Warm up every node, each in an engine of its own, as a worker on a GPU does. Names the first fault of each."""
    small = miniature(subject)
    with one_thread():
        faults = [fault for name in small.built if (fault := _fault(small, name))]
    if faults:
        title, *others = faults
        raise PluginError(title, "; ".join(others), WAY_OUT)


def _fault(small: Miniature, name: str) -> str:
    """Return what is wrong with the warm-up of a node, empty if it runs."""
    offers = node_module(small.built[name].module)
    begun: list[str] = []
    try:
        with torch.inference_mode():
            offers.warm_up()
        if requests := offers.warmup_requests():
            runners = make_runners(small.built, [name], _settings(small, requests), FakeClock(0.0), None)
            run_warmup(runners[name], requests, begun.append)
    except Exception as error:  # noqa: BLE001  the isolation boundary of one node: faults of the others are named too
        is_told = isinstance(error, MstarError) and not begun
        text = str(error) if isinstance(error, MstarError) else f"{type(error).__name__}: {error}"
        which = f"warm-up {begun[-1]!r}" if begun else "the warm-up"
        return text if is_told else f"{which} of node {name} failed: {text}"
    return ""


def _settings(small: Miniature, requests: Sequence[WarmupRequest]) -> RuntimeSettings:
    """Return settings with a cache as large as the requests need, within the model's own limit."""
    most = max(each.tokens for each in requests)
    return RuntimeSettings(slots=1, max_seq_len=min(most, small.spec.max_seq_len), prefix_cache=False)
