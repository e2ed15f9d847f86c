"""What this version cannot run yet, said before anything is started. Called by plan.py with a checked configuration."""

from __future__ import annotations

from collections.abc import Sequence

from mstar_core.config import Plan, ResolvedConfig
from mstar_core.errors import ConfigError, PluginError, UsageError, did_you_mean
from mstar_core.plugin import ModelSpec

TRANSPORTS = ("SHM", "TCP", "RDMA")


def check_code(model: ModelSpec) -> None:
    """Raises PluginError for a model whose plugin declares its graph only."""
    if model.model is None or model.processor is None:
        raise PluginError(
            f"{model.name}: the model code is not part of this version (the plugin declares its graph only)",
            hint=f"mstarctl models graph {model.name} shows what it declares; mstarctl models ls what can be served",
            plugin=model.plugin, code="no_model_code",
        )  # fmt: skip


def check_transport(protocol: str) -> str:
    """The protocol in capitals. Raises UsageError for an unknown one and for one that this version has not."""
    name = protocol.upper()
    if name not in TRANSPORTS:
        raise UsageError(f"no tensor protocol {protocol!r}", hint=did_you_mean(name, TRANSPORTS))
    if name != "SHM":
        raise UsageError(
            f"--tensor-comm-protocol {name} is not part of this version",
            "all ranks are on this host, where tensors move by shared memory",
            "use SHM, the default, or leave it out",
        )
    return name


def unused_options(
    transport: str, devices: Sequence[str], *, port: int | None, network: str | None, is_marked: bool
) -> tuple[str, ...]:
    """Options that were given and have no effect, each with its reason: shown by `up` and kept for `describe`.

    devices: of the ranks. port: --mooncake-port; network: --tcp-transfer-device; is_marked: --enable-nvtx.
    """
    given = {f"--mooncake-port {port}": port, f"--tcp-transfer-device {network}": network}
    found = [
        f"{flag} has no effect: tensors move by shared memory ({transport}), which uses no network"
        for flag, value in given.items()
        if value is not None
    ]
    if is_marked and not any(device.startswith("cuda") for device in devices):
        found.append("--enable-nvtx has no effect: every rank computes on the CPU, and NVTX marks work on GPUs")
    return tuple(found)


def weights_cautions(model: ModelSpec, config: ResolvedConfig) -> tuple[str, ...]:
    """What the operator should know of the weights: official ones that were not made for the options."""
    is_official = not config.is_tiny and not config.weights
    told = model.misfit(config.model_kwargs) if is_official and model.misfit is not None else ""
    return (told,) if told else ()


def check_placement(model: ModelSpec, config: ResolvedConfig, plan: Plan) -> None:
    """Raises ConfigError for tensor parallelism, and for a KV node whose walks run on different ranks."""
    for group in config.node_groups:
        if group.tp_size > 1:
            raise group.place.error(
                f"tensor parallelism is not part of this version ({group.key}.tp_size is {group.tp_size})",
                f"{group.key}.tp_size",
                hint="use tp_size 1",
            )  # fmt: skip
    for node in model.nodes:
        mine = [placement for placement in plan.placements if placement.node == node.name]
        if node.kv is None or len({placement.replicas for placement in mine}) < 2:
            continue
        where = "; ".join(f"{', '.join(p.walks or ('other walks',))} on {_ranks(p.replicas)}" for p in mine)
        raise ConfigError(
            f"node {node.name!r} holds a KV cache and its walks are placed on different ranks", where,
            "moving a cache between ranks is not part of this version: place all its walks on the same ranks",
            key="node_groups", file=config.config_file, line=None,
        )  # fmt: skip


def _ranks(replicas: tuple[tuple[int, ...], ...]) -> str:
    ranks = [str(rank) for replica in replicas for rank in replica]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
