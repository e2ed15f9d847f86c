"""From what was typed to a DeploymentSpec that will start, or the error that says why not. Called by `up`."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mstar_core.config import (
    DeploymentSpec,
    Override,
    ResolvedConfig,
    Settings,
    Target,
    find,
    make_plan,
    parse_set,
    read_file,
    resolve_target,
)
from mstar_core.config.deployment import Plan
from mstar_core.config.graph_view import graph_of
from mstar_core.errors import ConfigError, UsageError, WeightsError
from mstar_core.host.groups import group_id
from mstar_core.host.ports import check_port, port_claimant
from mstar_core.host.run_dir import RunDirectory, check_name
from mstar_core.plugin import ModelSpec, Plugins
from mstarctl.start.accelerator import gpu_processes, gpus
from mstarctl.start.devices import Devices, choose_devices, count_gpus, torch_version
from mstarctl.start.limits import check_code, check_placement, check_transport, unused_options, weights_cautions
from mstarctl.start.room import check_free, check_memory, concurrent_requests, free_bytes, gpu_keys, weights_bytes
from mstarctl.version import client_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for. None: not given, so that the file's value or the default holds."""

    target: str | None
    config: Path | None = None
    name: str | None = None
    host: str | None = None
    port: int | None = None
    gpus: str | None = None
    device: str | None = None
    weights: Path | None = None
    cache_dir: Path | None = None
    sets: Sequence[str] = ()
    api_keys: tuple[str, ...] = ()
    timeout_s: float | None = None
    stall_s: float = 120.0
    log_level: str = "INFO"
    transport: str = "SHM"
    run_root: Path | None = None
    upload_dir: Path | None = None
    log_stats: bool = False
    stats_file: Path | None = None
    bind_when_ready: bool = False
    remote_media: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    strict_model: bool = False
    admin_group: str | None = None
    mooncake_port: int | None = None
    transfer_device: str | None = None
    nvtx: bool = False
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A deployment that passed every check that can be made before a process exists. spec.log_dir is still empty."""

    model: ModelSpec
    config: ResolvedConfig
    devices: Devices
    spec: DeploymentSpec
    run: RunDirectory
    distribution: str
    walk_count: int


def make_planned(wanted: Wanted) -> Planned:
    """Find the model, read its file, place it, check this host. Raises the MstarError that `up` shows."""
    transport = check_transport(wanted.transport)
    plugins = Plugins.discover()
    target = find_target(wanted, plugins)
    config = resolve_target(target, overrides(wanted))
    model = target.spec
    check_code(model)
    devices = choose_devices(wanted.device, wanted.gpus, count_gpus(), torch_version())
    plan = make_plan(model, config, devices.names, plugins)
    check_placement(model, config, plan)
    run = run_directory(config.name, wanted.run_root)
    check_host(run, config)
    if wanted.admin_group is not None:
        group_id(wanted.admin_group)
    folder = None if config.is_tiny else weights_folder(config.weights)
    needed = weights_bytes(None if folder is None else Path(folder), config.quantization)
    claimed = claim_gpus(config, plan, needed)
    present = gpus() if claimed else ()
    concurrency = config.max_concurrent_requests or concurrent_requests(claimed, present)
    entry = plugins.distribution_of(model)
    settings = Settings.of(config)
    spec = DeploymentSpec(
        name=config.name,
        model=model.name,
        plugin=model.plugin,
        run_dir=str(run.path),
        log_dir="",
        plan=plan,
        folder=folder,
        weights_source="tiny" if config.is_tiny else "folder" if config.weights else "official",
        cache_dir=None if wanted.cache_dir is None else str(wanted.cache_dir.expanduser().absolute()),
        model_kwargs=dict(config.model_kwargs),
        max_seq_len=config.max_seq_len,
        max_concurrent_requests=concurrency,
        max_queue=config.max_queue,
        kv_cache=config.kv_cache,
        dtype=config.dtype,
        attention=config.attention,
        quantization=config.quantization,
        token_budget=config.token_budget,
        wait_spin_us=config.wait_spin_us,
        transport=transport,
        api=msgspec.structs.replace(config.api, api_keys=wanted.api_keys),
        log_level=wanted.log_level,
        admin_group=wanted.admin_group,
        stall_s=wanted.stall_s,
        config_file=str(target.config.path.absolute()) if target.config.path is not None else config.config_file,
        argv=wanted.argv,
        versions={"mstarctl": client_version(), entry.distribution: entry.version},
        settings={**settings.values, "max_concurrent_requests": concurrency},
        sources=dict(settings.sources),
        gpus=claimed,
        upload_dir=uploads_folder(wanted.upload_dir),
        log_stats=wanted.log_stats or wanted.stats_file is not None,
        stats_file=stats_path(wanted.stats_file),
        needed_bytes=needed,
        free_bytes=free_bytes(claimed, present),
        nvtx=wanted.nvtx,
        unused=unused_options(
            transport,
            [rank.device for rank in plan.ranks],
            port=wanted.mooncake_port,
            network=wanted.transfer_device,
            is_marked=wanted.nvtx,
        ),
        cautions=weights_cautions(model, config),
        graph=msgspec.to_builtins(graph_of(model, plan)),
    )
    walks = sum(len(partition.walks) for partition in model.partitions)
    return Planned(
        model=model,
        config=config,
        devices=devices,
        spec=spec,
        run=run,
        distribution=f"{entry.distribution} {entry.version}",
        walk_count=walks,
    )


def find_target(wanted: Wanted, plugins: Plugins) -> Target:
    """The model and the file. A MODEL and a --config must agree; the file decides when it stands alone."""
    if wanted.target is None:
        if wanted.config is None:
            raise UsageError("nothing to start was named", hint="mstarctl up MODEL; mstarctl models ls lists them")
        return find(str(wanted.config), plugins)
    target = find(wanted.target, plugins)
    if wanted.config is None:
        return target
    return Target(spec=target.spec, config=read_file(wanted.config), is_tiny=target.is_tiny)


def overrides(wanted: Wanted) -> list[Override]:
    """What the command line puts over the file, --set first, so that a flag of its own wins."""
    made = [parse_set(text) for text in wanted.sets]
    flags = {
        "name": ("--name", wanted.name),
        "weights": ("--weights", None if wanted.weights is None else str(wanted.weights)),
        "api.host": ("--host", wanted.host),
        "api.port": ("--port", wanted.port),
        "api.timeout_s": ("--timeout", wanted.timeout_s),
        "api.bind_when_ready": ("--bind-when-ready", True if wanted.bind_when_ready else None),
        "api.remote_media": ("--allow-remote-media", list(dict.fromkeys(wanted.remote_media)) or None),
        "api.cors_origins": ("--cors-origin", list(dict.fromkeys(wanted.cors_origins)) or None),
        "api.tls_cert": ("--tls-cert", absolute(wanted.tls_cert)),
        "api.tls_key": ("--tls-key", absolute(wanted.tls_key)),
        "api.strict_model": ("--strict-model", True if wanted.strict_model else None),
    }
    return made + [
        Override(key=key, value=value, source=flag) for key, (flag, value) in flags.items() if value is not None
    ]


def absolute(path: Path | None) -> str | None:
    """A file as processes that run elsewhere find it."""
    return None if path is None else str(path.expanduser().absolute())


def run_directory(name: str, root: Path | None) -> RunDirectory:
    """Where the deployment will live."""
    return RunDirectory.of(name) if root is None else RunDirectory(root.expanduser().absolute() / check_name(name))


def uploads_folder(given: Path | None) -> str | None:
    """The folder for request media. Raises ConfigError when nothing can be written there."""
    folder = absolute(given)
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        why = "it is no folder" if not os.path.isdir(folder) else "permission denied"
        raise ConfigError(f"--upload-dir {given} cannot be written", why, f"mkdir -p {folder}", key="upload_dir")
    return folder


def stats_path(given: Path | None) -> str | None:
    """The file for one line a request. Raises ConfigError when it cannot be written."""
    path = absolute(given)
    if path is not None and not os.access(path if os.path.exists(path) else os.path.dirname(path), os.W_OK):
        raise ConfigError(
            f"--log-stats-file {given} cannot be written", "no such folder, or permission denied",
            "name a file in a folder of yours", key="stats_file",
        )  # fmt: skip
    return path


def weights_folder(given: str | None) -> str | None:
    """The folder as an absolute path, for processes that run elsewhere. Raises WeightsError when it is none."""
    if given is None:
        return None
    folder = Path(given).expanduser().absolute()
    advice = "give this user access, or copy it"
    try:
        facts = folder.stat()
    except PermissionError as error:
        why = f"a folder above it is closed to this user, uid {os.getuid()}"
        raise WeightsError(f"{given} cannot be read", why, advice, file=str(folder)) from error
    except OSError:
        facts = None
    if facts is None or not stat.S_ISDIR(facts.st_mode):
        why = "it does not exist" if facts is None else "it is a file"
        raise WeightsError(
            f"{given} is no folder with weights", why, "--weights takes the folder of a checkpoint", file=str(folder)
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        why = f"owner uid {facts.st_uid}, mode {facts.st_mode & 0o7777:o}; this user is uid {os.getuid()}"
        raise WeightsError(f"{given} cannot be read", why, advice, file=str(folder))
    return str(folder)


def check_host(run: RunDirectory, config: ResolvedConfig) -> None:
    """Name and port are free. Raises ConfigError or StartError before anything is written."""
    pid = run.holder()
    if pid is not None:
        raise run.running_error(pid)
    run.check_length()
    check_port(config.api.host, config.api.port, port_claimant(config.api.host, config.api.port, run))


def claim_gpus(config: ResolvedConfig, plan: Plan, needed: int) -> dict[str, str]:
    """Device -> key of its lock, for the supervisor to take. Raises StartError for a GPU that is in use or too full."""
    devices = [rank.device for rank in plan.ranks]
    if not any(device.startswith("cuda") for device in devices):
        return {}
    present = gpus()
    keys = gpu_keys(devices, present)
    check_free(keys)
    check_memory(config.name, plan, keys, present, needed, gpu_processes())
    return keys
