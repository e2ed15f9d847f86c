"""`mstarctl config`: checks, shows, explains and compares deployment files. It starts nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.files.load import VARIANTS, ConfigFile, read_file, split_name
from mstar_core.config.files.resolution import resolve
from mstar_core.config.key import Setting
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.config.schema import SETTINGS, values_of
from mstar_core.errors import ConfigError, ExitCode, MstarError, NotFound, UsageError
from mstar_core.host.hardware.gpus import Gpu, visible_gpus
from mstar_core.host.hardware.gpus import gpus as present_gpus
from mstar_core.plugin import ModelSpec
from mstarctl.authoring.config_file import commented_file, differences
from mstarctl.authoring.config_schema import default_shown, explain, json_schema
from mstarctl.complete import configured_names, key_names, plugin_names, set_words, target_names
from mstarctl.output import Column, Printer
from mstarctl.output.errors import render_error
from mstarctl.output.units import counted
from mstarctl.plugins import Plugins
from mstarctl.start.hardware.admission import Admission, admission, weights_on_devices
from mstarctl.start.hardware.choice import GB, auto_count, choose
from mstarctl.start.plan import as_started
from mstarctl.start.target import Override, Target, find, parse_set, resolve_target

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Check, show and explain deployment files."
)

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="override a value of the file; repeatable",
        autocompletion=set_words,
    ),
]
What = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|FILE", help="a model, a shipped configuration's name, or a file", autocompletion=target_names
    ),
]

VALIDATED = (
    Column("FILE", "name"),
    Column("RESULT", "result"),
    Column("MODEL", "model"),
    Column("RANKS", "ranks", is_right=True),
    Column("NODES", "nodes", is_right=True),
)
RESOLVED = (Column("KEY", "name"), Column("VALUE", "value"), Column("FROM", "source"))
KEYS = (Column("KEY", "name"), Column("TYPE", "allowed"), Column("DEFAULT", "default_shown"), Column("", "doc"))
CHOICES = (
    Column("FILE", "name"),
    Column("RANKS", "ranks", is_right=True),
    Column("REQUESTS", "requests", is_right=True),
    Column("RESULT", "result"),
    Column("WHY", "why"),
    Column("REQUESTS WHY", "requests_why", is_wide=True),
)
DIFFERENT = (
    Column("KEY", "name"),
    Column("LEFT", "left"),
    Column("RIGHT", "right"),
    Column("LEFT FROM", "left_source", is_wide=True),
    Column("RIGHT FROM", "right_source", is_wide=True),
)


@app.command("validate")
def validate(
    ctx: typer.Context,
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="files, or names of shipped configurations")],
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="number of devices that ranks may use")
    ] = None,
) -> None:
    """Check files against their models; exit 3 if one is invalid."""
    printer = Printer.of(ctx)
    plugins = Plugins.discover()
    items = [_validated(text, plugins, devices, printer) for text in files]
    printer.items("config", items, VALIDATED)
    if any(item["result"] != "ok" for item in items):
        raise typer.Exit(ExitCode.INVALID)


def _validated(text: str, plugins: Plugins, devices: int | None, printer: Printer) -> dict[str, Any]:
    try:
        target = find(text, plugins)
        config = resolve_target(target)
        names = ("cpu",) if devices is None else tuple(f"cuda:{i}" for i in range(devices))
        plan = plugins.plan(target.spec, config, names)
    except MstarError as error:
        if not printer.is_machine:
            printer.problem(render_error(error))
        facts = {key: error.facts.get(key) for key in ("file", "line", "key", "nearest")}
        return {
            "name": text,
            "result": error.title,
            "model": None,
            "ranks": None,
            "nodes": None,
            "error": {"title": error.title, "detail": error.detail, "hint": error.hint, **facts},
        }
    return {
        "name": text,
        "result": "ok",
        "model": config.model,
        "ranks": len(plan.ranks),
        "nodes": len(target.spec.nodes),
        "error": None,
    }


@app.command("show")
def show(
    ctx: typer.Context,
    what: What,
    is_resolved: Annotated[bool, typer.Option("--resolved", help="every value with its source")] = False,
    sets: Sets = None,
) -> None:
    """Show a configuration as written, or with every default; that of deployment/NAME with --resolved."""
    printer = Printer.of(ctx)
    if (name := running_name(what)) is not None:
        if not is_resolved or sets:
            raise UsageError(f"{what} has no file of its own", hint=f"mstarctl config show {what} --resolved")
        printer.items("setting", resolved_items(running_spec(name)), RESOLVED)
        return
    target = find(what, Plugins.discover())
    if is_resolved:
        printer.items("setting", resolved_items(_resolve(target, sets)), RESOLVED)
        return
    _resolve(target, sets)
    if sets:
        raise UsageError("--set has no effect on the file as written", hint="add --resolved")
    if printer.is_machine:
        printer.data(target.config.root.plain(), f"config/{what}")
    else:
        printer.text(_text_of(target.config))


def _resolve(target: Target, sets: list[str] | None) -> ResolvedConfig:
    return resolve_target(target, [parse_set(text) for text in sets or []])


def resolved_items(config: ResolvedConfig) -> list[dict[str, Any]]:
    """Return every value with its source, one item per key."""
    return [{"name": key, "value": value, "source": config.source(key)} for key, value in values_of(config).items()]


def _text_of(config: ConfigFile) -> str:
    if config.path is None:
        return json.dumps(config.root.plain(), indent=2)
    return config.path.read_text(encoding="utf-8").rstrip("\n")


@app.command("explain")
def explain_key(
    ctx: typer.Context,
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY|MODEL]",
            help="a key such as kv_cache.pages, or a model with --gpus; default: all keys",
            autocompletion=key_names,
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="auto:N", help="explain which file of MODEL `up --gpus auto:N` chooses"),
    ] = None,
    gpu_gb: Annotated[
        float | None,
        typer.Option("--gpu-gb", metavar="GB", min=1, help="memory of each GPU; default: of the GPUs of this host"),
    ] = None,
) -> None:
    """Explain one key, list all keys, or explain the choice of a file for GPUs."""
    printer = Printer.of(ctx)
    if gpus is not None:
        printer.items("config", explain_choice(key, gpus, gpu_gb), CHOICES)
        return
    if gpu_gb is not None:
        raise UsageError("--gpu-gb has no effect without --gpus", hint="--gpus auto:N")
    if key is None:
        printer.items("setting", [_setting(item) for item in SETTINGS], KEYS)
        return
    item = explain(key)
    lines = [f"{item.key}  ({item.allowed}; default: {default_shown(item)})", f"  {item.doc}"]
    parts = [part for part in SETTINGS if part.parent.removesuffix("[]") == item.key]
    lines += [f"  {part.word:<18} {part.doc}" for part in parts]
    printer.item("setting", _setting(item), lines)


def explain_choice(model: str | None, gpus: str, gpu_gb: float | None) -> list[dict[str, Any]]:
    """Return every file of a model, the chosen one first, with the reason, and the requests that it runs at once.

    gpu_gb: of GPUs that need not be here.
    """
    count = auto_count(gpus)
    if model is None or not count:
        raise UsageError(f"--gpus is {gpus!r}", hint="mstarctl config explain MODEL --gpus auto:2")
    name, variant = split_name(model)
    plugins = Plugins.discover()
    spec = plugins.model(name)
    memories = [gpu.total for gpu in visible_gpus(present_gpus())] if gpu_gb is None else [int(gpu_gb * GB)] * count
    if len(memories) < count:
        raise ConfigError(
            f"--gpus {gpus} requests {counted(count, 'GPU')}",
            f"{counted(len(memories), 'GPU')} visible",
            "--gpu-gb GB explains the choice for GPUs that are not here",
            key="gpus",
        )
    choice = choose(spec, memories[:count], variant=variant)
    return [
        {
            "name": candidate.name,
            "ranks": candidate.ranks,
            "why": choice.why(candidate),
            "result": "chosen" if candidate is choice.best else "does not fit" if candidate.obstacle else "fits",
            **_admitted(
                plugins, spec, resolve(spec, candidate.file, variant=variant), [] if candidate.obstacle else memories
            ),
        }
        for candidate in choice.candidates
    ]


def _admitted(plugins: Plugins, spec: ModelSpec, config: ResolvedConfig, memories: Sequence[int]) -> dict[str, Any]:
    """Return the requests that a file runs at once, with the reason. memories: bytes of its GPUs, [] if it cannot."""
    if not memories:
        return {"requests": None, "requests_why": None}
    keys = {f"cuda:{index}": f"GPU-{index}" for index in range(config.rank_count)}
    present = [
        Gpu(name="", driver="", free=memories[index], total=memories[index], uuid=key)
        for index, key in enumerate(keys.values())
    ]
    plan = plugins.plan(spec, config, tuple(keys))
    admitted = admission(spec, config, plan, keys, present, weights_on_devices(spec, plan, config))
    return {"requests": admitted.max_concurrent_requests, "requests_why": admitted.why}


def _setting(item: Setting) -> dict[str, Any]:
    return {
        "name": item.key,
        "kind": item.kind,
        "allowed": item.allowed,
        "default": item.default,
        "default_shown": default_shown(item),
        "required": item.required,
        "doc": item.doc,
    }


@app.command("schema")
def schema(ctx: typer.Context) -> None:
    """Print the JSON schema of a deployment file, for editors."""
    Printer.of(ctx).data(json_schema(), "schema/deployment")


@app.command("init")
def init(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="the model of the file", autocompletion=plugin_names)],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="where to write it; default: stdout")] = None,
) -> None:
    """Write a commented file for a model, with the default of every key."""
    printer = Printer.of(ctx)
    text = commented_file(Plugins.discover().model(model))
    if file is None:
        printer.text(text.rstrip("\n"))
        return
    if file.exists():
        printer.confirm(f"overwrite {file}?")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written", error.strerror or str(error), file=str(file), key="") from error
    printer.say(f"wrote {file}")
    printer.say(f"  try: mstarctl config validate {file}")


@app.command("diff")
def diff(
    ctx: typer.Context,
    left: Annotated[
        str,
        typer.Argument(metavar="MODEL|FILE|deployment/NAME", help="the left side", autocompletion=configured_names),
    ],
    right: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|FILE|deployment/NAME]",
            help="the right side; default for a deployment: its file as it is now",
            autocompletion=configured_names,
        ),
    ] = None,
) -> None:
    """Compare two configurations, or a deployment with its file as it is now."""
    printer = Printer.of(ctx)
    if right is None:
        name = running_name(left)
        if name is None:
            raise UsageError(
                "only a deployment can be compared with its own file", hint=f"mstarctl config diff {left} OTHER"
            )
        spec = running_spec(name)
        items = differences(spec, config_now(spec))
    else:
        items = differences(config_of(left), config_of(right))
    printer.items("setting", items, DIFFERENT, empty="no differences")
    if right is None and items:
        printer.say(f"  try: mstarctl down {running_name(left)}, then mstarctl up with the file as it is now")


def running_name(text: str) -> str | None:
    """Return the NAME of `deployment/NAME`, None for other words."""
    kind, slash, name = text.partition("/")
    return name if slash and kind == "deployment" and name else None


def config_of(text: str) -> ResolvedConfig:
    """Return the configuration of a model, a file or a running deployment."""
    name = running_name(text)
    return running_spec(name) if name is not None else resolve_target(find(text, Plugins.discover()))


def running_spec(name: str) -> DeploymentSpec:
    """Return the specification of a running deployment. Raises NotFound."""
    from mstarctl.client.gateways import running_here

    run = running_here(name)
    try:
        return DeploymentSpec.load(run.spec)
    except OSError as error:
        raise NotFound(f"deployment {name!r} has just ended", kind="deployment", name=name) from error


def config_now(spec: DeploymentSpec) -> ResolvedConfig:
    """Return the configuration that the same command line gives now: the current file, overridden by its options."""
    if spec.config_file is None:
        hint = f"mstarctl config diff deployment/{spec.name} FILE"
        raise NotFound(f"{spec.name} was started without a file", hint=hint)
    model = find(spec.model, Plugins.discover()).spec
    variant = spec.weights_source if spec.weights_source in VARIANTS else ""
    target = Target(spec=model, config=read_file(Path(spec.config_file)), variant=variant)
    flags = [
        Override(key=key, value=value, source=spec.source(key))
        for key, value in values_of(spec).items()
        if spec.source(key).startswith("--")
    ]
    config, present = resolve_target(target, flags), present_gpus() if spec.gpus else ()
    if spec.hosts and config.max_concurrent_requests is None:  # GPUs of other hosts are not surveyed again
        why = spec.source("max_concurrent_requests")
        return as_started(config, Admission(max_concurrent_requests=spec.max_concurrent_requests, why=why))
    return as_started(config, admission(model, config, spec.plan, spec.gpus, present, spec.needed_bytes))
