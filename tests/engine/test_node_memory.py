"""Memory of every model's nodes: all of it can be given back, and a second load from the files restores each value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mstar_core.conformance.nodes import build_nodes
from mstar_core.engine.memory.cpu import CpuSleeper
from mstar_core.engine.memory.node_memory import NodeMemory, loaded_again, named_tensors
from mstar_core.plugin.loader import load_plugin, plugin_entries
from mstar_core.plugin.spec import ModelSpec
from mstar_core.targets import load_target

MODELS = {
    spec.name: spec
    for entry in plugin_entries()
    for spec in load_plugin(entry.name)
    if spec.tiny is not None and spec.model is not None
}


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_weights_loaded_again_equal_those_before(spec: ModelSpec, tmp_path: Path) -> None:
    assert spec.tiny is not None
    load_target(spec.tiny)(tmp_path / "tiny")
    bound = spec.bound(tmp_path / "tiny", spec.model_kwargs)
    nodes, again = build_nodes(bound, tmp_path / "tiny"), build_nodes(bound, tmp_path / "tiny")
    modules = {name: node.module for name, node in nodes.items()}
    before = {name: {at: v.clone() for at, v in named_tensors(m).items()} for name, m in modules.items()}
    sleeper = CpuSleeper(torch.device("cpu"))
    for name, module in modules.items():
        sleeper.hold(name, NodeMemory(module=module))
    with torch.inference_mode():
        for name in modules:
            sleeper.pause(name, 2)
        left = [at for m in modules.values() for at, p in m.named_parameters() if p.untyped_storage().nbytes()]
        assert left == []
        pairs = [
            pair
            for name, module in modules.items()
            for pair in loaded_again(module, again[name].module, sleeper.dropped([name]))
        ]
        sleeper.resume(list(modules), pairs)
    for name, module in modules.items():
        changed = [at for at, value in named_tensors(module).items() if not torch.equal(value, before[name][at])]
        assert changed == []
