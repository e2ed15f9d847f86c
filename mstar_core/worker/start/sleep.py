"""Set-up of a rank's sleep: the sleeper of its device with the memory of its nodes, and the second load of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from mstar_core.engine.memory.cpu import CpuSleeper
from mstar_core.engine.memory.placed import PlacedSleeper
from mstar_core.engine.memory.virtual_memory import DriverMemory
from mstar_core.worker.start.build import load_prepared, own_nodes
from mstar_core.worker.state.sleep import RankSleep

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mstar_core.config.deployment import DeploymentSpec, RankPlan
    from mstar_core.engine.memory.sleeper import Sleeper
    from mstar_core.engine.runner import NodeRunner
    from mstar_core.parallel.groups import RankGroup
    from mstar_core.plugin.spec import ModelSpec
    from mstar_core.worker.state.sleep import Answer, Holds, Load


def sleeper_of(device: torch.device, spec: DeploymentSpec) -> Sleeper | None:
    """Return the sleeper of a device; None for a GPU whose memory is not placed for that."""
    if device.type == "cpu":
        return CpuSleeper(device)
    if not spec.sleepable:
        return None
    return PlacedSleeper(device, DriverMemory(device), keeps_copies=spec.sleep_copies)


def hold_memory(sleeper: Sleeper | None, runners: Mapping[str, NodeRunner]) -> None:
    """Let a sleeper hold the memory of nodes, which it may move."""
    if sleeper is not None:
        for name, runner in runners.items():
            sleeper.hold(name, runner.node_memory())


def rank_sleep(
    spec: DeploymentSpec,
    model: ModelSpec,
    rank: RankPlan,
    runners: Mapping[str, NodeRunner],
    device: torch.device,
    sleeper: Sleeper | None,
    answer: Answer,
    *,
    group: RankGroup | None = None,
    shared: frozenset[str] = frozenset(),
    steps: Holds | None = None,
) -> RankSleep:
    """Return the sleep of a rank. group, shared: of a tensor-parallel group, see `build_nodes`. steps: of a worker."""
    nodes = [*own_nodes(model, rank), *(model.node(name) for name in rank.follows)]

    def load(names: Collection[str], progress: Callable[[int, int], object]) -> Mapping[str, nn.Module]:
        wanted = [node for node in nodes if node.name in names]

        def report(done: int, total: int, file: str) -> None:
            progress(done, total)

        loaded, _ = load_prepared(spec, model, device, wanted, group, shared, report)
        return {node.name: module for node, module, _ in loaded}

    known: Load = load
    sleep = RankSleep(
        runners=runners,
        owner=lambda name: model.node(name).owner.name,
        sleeper=sleeper,
        why_not=f"the memory of {device} cannot be given back",
        hint="start the deployment with --set sleepable=true",
        load=known,
        answer=answer,
    )
    if steps is not None:
        sleep.steps = steps
    return sleep
