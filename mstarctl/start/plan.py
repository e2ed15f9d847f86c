"""Planner of `up`: turns its options into a DeploymentSpec, or raises the error that says why it cannot start.

It refuses what this version does not support, and checks names, ports, weights and GPUs of this host.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.config.files.load import shipped, split_name
from mstar_core.config.graph_view import graph_of
from mstar_core.config.name import check_name
from mstar_core.config.resolved import ApiConfig, NodeGroup, ResolvedConfig
from mstar_core.errors import ConfigError, PluginError, StartError, UsageError, WeightsError, did_you_mean
from mstar_core.host.aliases import next_link
from mstar_core.host.api_keys import with_keys
from mstar_core.host.gpu_locks import MemoryClaim
from mstar_core.host.groups import group_id
from mstar_core.host.hardware.fake_memory import fake_key, fake_memory, ledger_device
from mstar_core.host.hardware.gpus import Gpu, count_gpus, gpu_keys, gpu_processes, gpus, visible_gpus
from mstar_core.host.leftovers import end_leftovers
from mstar_core.host.network import LOOPBACK
from mstar_core.host.ports import check_port, port_claimant
from mstar_core.host.run_dir import RunDirectory
from mstar_core.host.tls.certificates import load_certificate
from mstar_core.plugin import ModelSpec
from mstar_core.weights.folder_check import check_folder
from mstarctl.client.log_dirs import check_log_dir
from mstarctl.output.durations import parse_duration
from mstarctl.plugins import Plugins
from mstarctl.start.hardware.adapters import plan_adapters
from mstarctl.start.hardware.admission import Admission, admission, quantized_share, weights_on_devices
from mstarctl.start.hardware.budget import LedgerDevices, check_room, with_budget
from mstarctl.start.hardware.capacity import check_free, check_memory, free_bytes, weights_bytes
from mstarctl.start.hardware.choice import Candidate, auto_count, choose, obstacle
from mstarctl.start.hardware.devices import Devices, choose_devices, torch_version
from mstarctl.start.hosts.checks import check_hosts, host_cautions
from mstarctl.start.hosts.cluster import find_cluster
from mstarctl.start.hosts.placement import HostPlacement, place, scaled
from mstarctl.start.movable_state import check_moves
from mstarctl.start.options import UpOptions, absolute, overrides
from mstarctl.start.replaced import Replaced, check_beside, find_replaced
from mstarctl.start.target import Target, find, named_file, resolve_target
from mstarctl.start.transports import check_transport, transport_cautions, unused_transport
from mstarctl.version import client_version

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A deployment that passed every check possible before a process exists. spec.log_dir is still empty.

    is_chosen: its file was chosen for the devices.
    """

    model: ModelSpec
    config: ResolvedConfig
    devices: Devices
    spec: DeploymentSpec
    run: RunDirectory
    distribution: str
    walk_count: int
    is_chosen: bool = False


def make_planned(
    options: UpOptions, *, api_keys: tuple[str, ...] = (), argv: tuple[str, ...] = (), is_survey: bool = False
) -> Planned:
    """Find the model, read its file, place it, check this host. Raises the MstarError that `up` shows.

    api_keys: of the command line. argv: the command line, recorded for `describe`. is_survey: names, ports and GPUs
    may be in use.
    """
    refuse_front_end(options)
    of_options = facts_of(options)
    old = find_replaced(options)
    plugins = Plugins.discover()
    target = find_target(options, plugins)
    config = resolve_target(target, overrides(options))
    if old is not None:
        config = old.taken_over(config, options)
    model = target.spec
    check_code(model)
    entry = plugins.distribution_of(model)
    packages = {"mstarctl": client_version(), entry.distribution: entry.version}
    cluster = find_cluster(config, options, packages, torch_version())
    if cluster is not None and (auto_count(options.gpus) or options.is_fitted):
        target = chosen_target(options, target, [gpu.total_bytes for gpu in cluster.offer.free])
        config = resolve_target(target, overrides(options))
        cluster = replace(cluster, config=config)
    placement = None if cluster is None else place(cluster, partial(plugins.plan, model, config))
    if placement is None:
        devices = choose_devices(options.device, options.gpus, count_gpus(), torch_version())
        plan = scaled(plugins.plan(model, config, devices.names), options.replicas, devices.names)
    else:
        devices, plan = placement.devices, placement.plan
    if target.why:
        devices = replace(devices, why=f"{devices.why}; {target.why}")
    check_placement(model, config, plan)
    check_transport(config, plan, LOOPBACK if placement is None else placement.hosts[0].address)
    run = old.run.successor if old is not None else run_directory(config.name, options.run_root)
    if not options.is_dry and not is_survey:
        end_leftovers(run)
    if not is_survey:
        check_host(run, config, is_free=old is None)
    if options.admin_group is not None:
        group_id(options.admin_group)
    folder = None if config.variant else weights_folder(config.weights)
    needed = weights_bytes(None if folder is None else Path(folder))
    needed = int(needed * quantized_share(model, plan, config.quantization))
    needed = needed or weights_on_devices(model, plan, config)
    if placement is None:
        plan, claimed = claim_gpus(model, config, plan, needed, old, is_survey=is_survey)
    else:
        claimed = claim_on_hosts(config, placement, needed)
    if old is not None:
        check_beside(old, config, claimed.locks, claimed.present, needed, stop_first=options.stop_first)
    if cluster is not None and placement is not None:
        check_hosts(cluster, placement)
    started = as_started(config, admission(model, config, plan, claimed.keys, claimed.present, needed))
    api = with_keys(msgspec.structs.replace(started.api, api_keys=api_keys))
    path = target.config.path
    lora, adapters = plan_adapters(model, config)
    cautions = weights_cautions(model, config) + parallel_cautions(plan) + transport_cautions(config, plan)
    spec = DeploymentSpec(
        **{
            **msgspec.structs.asdict(started),
            **of_options,
            "api": api,
            "lora": lora,
            "config_file": config.config_file if path is None else str(path.absolute()),
        },
        plugin=model.plugin,
        run_dir=str(run.path),
        log_dir="",
        plan=plan,
        folder=folder,
        weights_source=config.variant or ("folder" if config.weights else "official"),
        argv=argv,
        versions=packages,
        gpus=claimed.locks,
        claims=claimed.shares,
        hosts=() if placement is None else placement.hosts,
        needed_bytes=needed,
        free_bytes=claimed.free_bytes,
        unused=unused_options(options, config, plan),
        cautions=cautions if cluster is None else cautions + host_cautions(cluster, plan),
        replaces="" if old is None else str(old.run.path),
        stop_first=options.stop_first,
        adapters=adapters,
        next_adapter=len(adapters) + 1,
        graph=msgspec.to_builtins(graph_of(model, plan)),
    )
    return Planned(
        model=model,
        config=config,
        devices=devices,
        spec=spec,
        run=run,
        distribution=f"{entry.distribution} {entry.version}",
        walk_count=sum(len(partition.walks) for partition in model.partitions),
        is_chosen=bool(target.why),
    )


def refuse_front_end(options: UpOptions) -> None:
    """Raise UsageError for the options of another front end."""
    if options.rust_frontend or options.rust_frontend_bin is not None:
        raise UsageError("--rust-frontend is not supported", "mstarctl has one front end", "omit the option")


def facts_of(options: UpOptions) -> dict[str, Any]:
    """Return the fields of the deployment record that options alone set. Raises UsageError and ConfigError."""
    return {
        "stall_s": parse_duration(options.stall, "--stall"),
        "log_level": check_log_level(options.log_level),
        "cache_dir": absolute(options.cache_dir),
        "admin_group": options.admin_group,
        "upload_dir": uploads_folder(options.upload_dir),
        "log_stats": options.log_stats or options.stats_file is not None,
        "stats_file": stats_path(options.stats_file),
        "nvtx": options.nvtx,
        "owner": options.owner,
    }


def as_started(config: ResolvedConfig, admitted: Admission) -> ResolvedConfig:
    """Return the configuration as child processes read it: paths absolute, and the number of requests at once."""
    return msgspec.structs.replace(
        config,
        api=with_paths(config.api),
        max_concurrent_requests=admitted.max_concurrent_requests,
        provenance={**config.provenance, "max_concurrent_requests": admitted.why},
    )


def find_target(options: UpOptions, plugins: Plugins) -> Target:
    """Return the model and its file. MODEL and --config must agree; a file alone names its model.

    --config is a path, or the name of a file that MODEL ships.
    """
    if options.target is None:
        if options.config is None:
            raise UsageError(
                "no model or file was given", hint="mstarctl up MODEL; mstarctl models ls lists the models"
            )
        return find(str(options.config), plugins)
    target = find(options.target, plugins)
    if options.config is None:
        on_hosts = any(override.key == "ray.address" for override in overrides(options))
        return target if on_hosts else chosen_target(options, target)
    config = named_file(options.config, shipped(target.spec))
    return Target(spec=target.spec, config=config, variant=target.variant)


def chosen_target(options: UpOptions, target: Target, memories: Sequence[int] | None = None) -> Target:
    """Return the target with the file that `--gpus auto:N` or `--fit` chooses; a file that the operator named is kept.

    memories: bytes of the GPUs that are free; None: of this host. Raises ConfigError if no file fits.
    """
    count = auto_count(options.gpus)
    names = (target.spec.name, *target.spec.aliases)
    if options.target is None or split_name(options.target)[0] not in names or options.config is not None:
        return target
    if not count:
        return fitted_target(options, target, memories) if options.is_fitted else target
    sizes = [gpu.total for gpu in visible_gpus(gpus())] if memories is None else memories
    if len(sizes) < count:
        return target
    best, reason = _best(options, target, sizes[:count])
    return replace(target, config=best.file, why=f"{options.gpus} chose {best.name}: {reason}")


def fitted_target(options: UpOptions, target: Target, memories: Sequence[int] | None) -> Target:
    """Return the target, with another file of the model if its own does not fit the devices of the options."""
    sizes = device_memories(options) if memories is None else memories
    if not sizes:
        return target
    why_not = obstacle(resolve_target(target, overrides(options)), sizes, variant=target.variant)
    if not why_not:
        return target
    best, reason = _best(options, target, sizes)
    own = "its own file" if target.config.path is None else target.config.path.stem
    return replace(target, config=best.file, why=f"{own} {why_not}; {best.name} fits: {reason}")


def _best(options: UpOptions, target: Target, memories: Sequence[int]) -> tuple[Candidate, str]:
    """Return the file for some GPUs, and the reason. memories: bytes of each GPU."""
    choice = choose(target.spec, memories[: len(memories) // (options.replicas or 1)], variant=target.variant)
    return choice.best, choice.why(choice.best)


def device_memories(options: UpOptions) -> list[int]:
    """Return the bytes of each GPU that the options select, 0 if unknown; of faked devices on the CPU, else none."""
    names = choose_devices(options.device, options.gpus, count_gpus(), torch_version()).names
    if names == ("cpu",):
        return list(fake_memory().values())
    visible = dict(enumerate(visible_gpus(gpus())))
    indices = [int(name.partition(":")[2]) for name in names]
    return [visible[index].total if index in visible else 0 for index in indices]


def check_log_level(text: str) -> str:
    """Return the log level in capitals. Raises UsageError."""
    level = text.upper()
    if level not in LEVELS:
        raise UsageError(f"unknown log level {text!r}", hint=did_you_mean(level, LEVELS))
    return level


def check_code(model: ModelSpec) -> None:
    """Raise PluginError for a model whose plugin declares only its graph."""
    if model.model is None or model.processor is None:
        raise PluginError(
            f"{model.name}: this version has no code for the model (the plugin declares only its graph)",
            hint=f"mstarctl models graph {model.name} shows the graph; mstarctl models ls lists models that can run",
            plugin=model.plugin,
            code="no_model_code",
        )


def check_placement(model: ModelSpec, config: ResolvedConfig, plan: Plan) -> None:
    """Raise ConfigError for tensor parallelism, and for nodes on several ranks whose state cannot move."""
    for group in config.node_groups:
        if group.tp_size > 1:
            _check_parallel(model, config, group, plan)
    check_moves(model, config, plan)


def _check_parallel(model: ModelSpec, config: ResolvedConfig, group: NodeGroup, plan: Plan) -> None:
    """Raise ConfigError for tensor parallelism of a node that cannot be divided, and for a GPU in two roles."""
    undivided = [name for name in group.node_names if not model.node(name).parallel_sizes]
    if undivided:
        raise config.group_error(
            group,
            "tp_size",
            f"node {undivided[0]!r} of {model.name} cannot be divided among ranks by this version",
            f"tp_size is {group.tp_size}",
            "use tp_size 1",
        )
    for rank in plan.ranks:
        if rank.follows and rank.nodes and rank.device != "cpu":
            raise config.group_error(
                group,
                "ranks",
                f"rank {rank.rank} follows in a tensor-parallel group and serves {', '.join(rank.nodes)} itself",
                "this version supports that on the CPU only",
                f"place {', '.join(rank.nodes)} on another rank",
            )


def unused_options(options: UpOptions, config: ResolvedConfig, plan: Plan) -> tuple[str, ...]:
    """Return a sentence for each given option that has no effect; `up` warns of it and `describe` lists it."""
    unused = unused_transport(config, plan)
    if options.nvtx and not any(rank.device.startswith("cuda") for rank in plan.ranks):
        unused.append("--enable-nvtx has no effect: every rank computes on the CPU, and NVTX marks work on GPUs")
    return tuple(unused)


def parallel_cautions(plan: Plan) -> tuple[str, ...]:
    """Return warnings about tensor-parallel groups on GPUs."""
    devices = {rank.rank: rank.device for rank in plan.ranks}
    if any(devices[rank] != "cpu" for group in plan.groups for rank in group.ranks):
        return ("tensor parallelism on several GPUs is new: compare its answers with those of one GPU",)
    return ()


def weights_cautions(model: ModelSpec, config: ResolvedConfig) -> tuple[str, ...]:
    """Return warnings about the weights: official weights that were not trained for the options."""
    is_official = not config.variant and not config.weights
    caution = model.misfit(config.model_kwargs) if is_official and model.misfit is not None else ""
    return (caution,) if caution else ()


def with_paths(api: ApiConfig) -> ApiConfig:
    """Return the configuration with absolute paths of its files, for processes with another working directory."""
    names = ("api_key_file", "metrics_key_file", "tls_cert", "tls_key")
    servers = tuple(
        msgspec.structs.replace(
            server, credential_file=absolute(server.credential_file), secret_file=absolute(server.secret_file)
        )
        for server in api.realtime_ice_servers
    )
    paths = {name: absolute(getattr(api, name)) for name in names}
    return msgspec.structs.replace(api, **paths, realtime_ice_servers=servers)


def run_directory(name: str, root: Path | None) -> RunDirectory:
    """Return the run directory of a deployment. root: its parent, None for the default."""
    return RunDirectory.of(name) if root is None else RunDirectory(root.expanduser().absolute() / check_name(name))


def uploads_folder(path: Path | None) -> str | None:
    """Return the directory for request media. Raises ConfigError if it is not writable."""
    folder = absolute(path)
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        why = "it is not a directory" if not os.path.isdir(folder) else "permission denied"
        raise ConfigError(f"--upload-dir {path} cannot be written", why, f"mkdir -p {folder}", key="upload_dir")
    return folder


def stats_path(file: Path | None) -> str | None:
    """Return the file for request statistics. Raises ConfigError if it is not writable."""
    path = absolute(file)
    if path is not None and not os.access(path if os.path.exists(path) else os.path.dirname(path), os.W_OK):
        raise ConfigError(
            f"--log-stats-file {file} cannot be written",
            "the directory does not exist, or permission is denied",
            "name a file in a directory that you can write",
            key="stats_file",
        )
    return path


def weights_folder(path: str | None) -> str | None:
    """Return the weights directory as an absolute path. Raises WeightsError if it cannot be read."""
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    advice = "give this user access, or copy it"
    try:
        facts = folder.stat()
    except PermissionError as error:
        why = f"this user, uid {os.getuid()}, may not enter a parent directory"
        raise WeightsError(f"{path} cannot be read", why, advice, file=str(folder)) from error
    except OSError:
        facts = None
    if facts is None or not stat.S_ISDIR(facts.st_mode):
        why = "it does not exist" if facts is None else "it is a file"
        raise WeightsError(
            f"{path} is not a directory with weights",
            why,
            "--weights takes the directory of a checkpoint",
            file=str(folder),
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        why = f"owner uid {facts.st_uid}, mode {facts.st_mode & 0o7777:o}; this user is uid {os.getuid()}"
        raise WeightsError(f"{path} cannot be read", why, advice, file=str(folder))
    check_folder(folder)
    return str(folder)


def check_host(run: RunDirectory, config: ResolvedConfig, *, is_free: bool = True) -> None:
    """Raise ConfigError or StartError if the name or the port is taken. Nothing has been written yet.

    is_free: name and port must be free; else they are those of the deployment that is replaced.
    """
    for claimed in (run, RunDirectory(next_link(run.path))) if is_free else ():
        pid = claimed.holder()
        if pid is not None:
            raise claimed.running_error(pid)
    run.check_usable()
    check_log_dir(run.name)
    check_certificate(config)
    if is_free:
        check_port(config.api.host, config.api.port, port_claimant(config.api.host, config.api.port, run))


def check_certificate(config: ResolvedConfig) -> None:
    """Raise ConfigError, with the file and line or the flag, for certificate files that the api cannot load."""
    api = with_paths(config.api)
    try:
        load_certificate(api.tls_cert, api.tls_key)
    except StartError as error:
        key = "api.tls_cert" if api.tls_cert is not None else "api.tls_key"
        raise config.error(key, error.title, error.detail, error.hint) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """GPUs of a plan. locks: lock key by device of this host, for the supervisor. keys: of `present` by place.

    shares: memory by key, of a deployment with a budget.
    """

    locks: dict[str, str]
    keys: dict[str, str]
    present: Sequence[Gpu]
    free_bytes: int
    shares: dict[str, MemoryClaim] = field(default_factory=dict)


def claim_gpus(
    model: ModelSpec, config: ResolvedConfig, plan: Plan, needed: int, old: Replaced | None = None, *, is_survey: bool
) -> tuple[Plan, Claim]:
    """Return the plan with its memory budget, and its GPUs. Raises StartError for one that is in use or too full.

    old: the deployment that is replaced, whose GPUs count as free; `check_beside` compares their memory. is_survey:
    others may hold the GPUs.
    """
    devices = [rank.device for rank in plan.ranks]
    fakes = {} if any(device.startswith("cuda") for device in devices) else fake_memory()
    if not fakes and not any(device.startswith("cuda") for device in devices):
        plan, _ = with_budget(model, config, plan, LedgerDevices(keys={}, totals={}), needed)
        return plan, Claim(locks={}, keys={}, present=(), free_bytes=free_bytes({}, ()))
    present = [] if fakes else gpus()
    keys = gpu_keys(devices, present)
    used = {ledger_device(rank, list(fakes)) for rank in plan.ranks}
    locks = keys or {device: fake_key(device) for device in fakes if device in used}
    totals = {gpu.uuid: gpu.total for gpu in present} | {fake_key(device): size for device, size in fakes.items()}
    plan, shares = with_budget(
        model, config, plan, LedgerDevices(keys=locks, totals=totals, fakes=tuple(fakes)), needed
    )
    held = frozenset() if old is None else frozenset(old.spec.gpus.values())
    if not is_survey:
        check_free({device: key for device, key in locks.items() if key not in held and key not in shares})
        check_room(shares, config.name, own=held)
        if old is None and not fakes:
            check_memory(config.name, plan, keys, present, needed, gpu_processes)
    return plan, Claim(locks=locks, keys=keys, present=present, free_bytes=free_bytes(keys, present), shares=shares)


def claim_on_hosts(config: ResolvedConfig, placement: HostPlacement, needed: int) -> Claim:
    """Return the GPUs of a plan on several hosts. Raises StartError for one that is in use or too full.

    Each host locks its own GPUs when the deployment starts there. Raises ConfigError for a memory budget.
    """
    if config.memory_budget is not None:
        title = "memory_budget needs a deployment on one host"
        hint = "remove memory_budget or --ray; replicas on other hosts with budgets: hosts of serve.yaml"
        raise config.error("memory_budget", title, "hosts of a cluster are held whole", hint)
    keys, present = placement.keys, placement.cards
    if not keys:
        memory = sum(host.memory_free for host in placement.used_hosts)
        return Claim(locks={}, keys={}, present=(), free_bytes=memory)
    check_free(placement.local_keys)
    holders = gpu_processes if placement.local_keys else tuple
    check_memory(config.name, placement.plan, keys, present, needed, holders)
    return Claim(locks=placement.local_keys, keys=keys, present=present, free_bytes=free_bytes(keys, present))
