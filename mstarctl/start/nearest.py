"""The nearest start that would run, for the hint of a failed `up`."""

from __future__ import annotations

from typing import Final

from mstar_core.errors import ConfigError, MstarError, StartError, WeightsError
from mstarctl.plugins import Plugins
from mstarctl.start.options import UpOptions
from mstarctl.start.target import find

LACKS: Final = ("gpu_in_use", "gpu_memory", "stalled", "out_of_memory", "cuda_oom")
"""Codes of starts that lack GPUs, memory or weights."""

PHASES: Final = ("fetch", "weights", "device", "kv")
"""Phases whose failures are those of the host or of the weights, not of the options."""


def with_nearest(error: MstarError, options: UpOptions) -> MstarError:
    """Return the error with a start in its hint that needs no GPU and no download; unchanged if there is none."""
    command = nearest_start(options) if _lacks_resources(error) else ""
    if command and command.removeprefix("mstarctl up ") not in error.hint:
        runs = f"{command} runs on the CPU, with random weights"
        error.hint = f"{error.hint}; {runs}" if error.hint else runs
    return error


def _lacks_resources(error: MstarError) -> bool:
    match error:
        case WeightsError():
            return True
        case StartError():
            return error.code in LACKS or any(f"phase {phase}" in error.detail for phase in PHASES)
        case ConfigError():
            return error.facts.get("key") in ("device", "gpus")
    return False


def nearest_start(options: UpOptions) -> str:
    """Return the command that starts the model's miniature on the CPU; empty if it has none or was given."""
    if options.target is None:
        return ""
    try:
        target = find(options.target, Plugins.discover())
    except MstarError:
        return ""
    asks_gpu = options.gpus is not None or options.device == "cuda"
    if target.spec.tiny is None or (target.variant and not asks_gpu):
        return ""
    return f"mstarctl up {target.spec.name}:tiny{' --device cpu' if target.variant else ''}"
