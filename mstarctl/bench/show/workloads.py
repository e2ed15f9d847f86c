"""Workloads of the installed models as a list, and the first requests of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mstar_core.errors import NotFound, did_you_mean
from mstar_core.plugin.offers import WorkloadSpec
from mstar_core.plugin.spec import ModelSpec
from mstar_core.workloads import ServedModel, WorkloadRequest
from mstarctl.bench.load.workloads import GENERIC, source_of
from mstarctl.plugins import Plugins

ANY: Final = "any server"


def offers(model: str | None) -> list[tuple[str, WorkloadSpec, ServedModel]]:
    """Return (model, workload, card) of every installed model, or of one; then the generic ones. Raises NotFound."""
    plugins = Plugins.discover()
    specs = list(plugins.models()) if model is None else [plugins.model(model)]
    rows = [(spec.name, workload, card_of(spec)) for spec in specs for workload in plugins.workloads(spec)]
    known = {workload.name for _, workload, _ in rows}
    generic = [] if model is not None else [workload for workload in GENERIC if workload.name not in known]
    return [*rows, *((ANY, workload, ServedModel(name="")) for workload in generic)]


def card_of(spec: ModelSpec) -> ServedModel:
    """Return the card of a model that is not served."""
    return ServedModel(
        name=spec.name,
        inputs=tuple(kind.kind for kind in spec.inputs),
        outputs=tuple(kind.kind for kind in spec.outputs),
        max_model_len=spec.max_seq_len,
        endpoints=("/generate",),
        robot=spec.robot_facts(),
    )


def workload_items(model: str | None) -> list[dict[str, Any]]:
    """Return the workloads by name with the models that offer them."""
    items: dict[str, dict[str, Any]] = {}
    for owner, spec, _ in offers(model):
        item = items.setdefault(spec.name, {"name": spec.name, "title": spec.title, "models": []})
        item["models"].append(owner)
    return list(items.values())


def requests_of(name: str, model: str | None, count: int, seed: int) -> list[dict[str, Any]]:
    """Return the first requests of a workload, in the form of a file of requests. Raises NotFound."""
    known = offers(model)
    for _, spec, card in known:
        if spec.name == name:
            drawn = source_of(spec)(card, seed)
            return [shown(next(drawn)) for _ in range(count)]
    names = [spec.name for _, spec, _ in known]
    raise NotFound(f"no workload {name!r}", hint=did_you_mean(name, names), kind="workload", name=name)


def shown(request: WorkloadRequest) -> dict[str, Any]:
    """Return a request without the contents of its files."""
    facts: Mapping[str, Any] = {
        "outputs": list(request.outputs),
        "text": request.text,
        "params": dict(request.params),
        "files": [f"{name} ({len(data)} bytes)" for name, data in request.files],
    }
    return {key: value for key, value in facts.items() if value}
