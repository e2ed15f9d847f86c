"""Example `mstarctl call` that `up` prints for the model it has started."""

from __future__ import annotations

from pathlib import Path

from mstar_core.errors import MstarError
from mstar_core.plugin.spec import ModelSpec
from mstar_core.workloads.samples import samples_of
from mstarctl.call.samples import client_form, first_call


def example_call(model: ModelSpec, source: str = "", folder: Path | None = None) -> str:
    """Return options of `mstarctl call` for the model's first sample; empty if it has none, or its plugin fails.

    source, folder: of the weights, as in `samples_of`.
    """
    try:
        return first_call([client_form(sample) for sample in samples_of(model, source, folder)])
    except MstarError:  # the deployment serves; `mstarctl sample` reports the failure
        return ""
