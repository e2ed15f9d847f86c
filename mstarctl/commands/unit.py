"""`mstarctl unit`: prints a systemd unit that runs a deployment as a service."""

from __future__ import annotations

import getpass
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.name import check_name
from mstar_core.errors import ConfigError, NotFound, UsageError
from mstarctl.client.deployments import find_known, last_log_dir
from mstarctl.client.reach import only_here
from mstarctl.complete import bare, target_names
from mstarctl.output import Printer
from mstarctl.plugins import Plugins
from mstarctl.start.service.unit import service_words, unit_text, without_replace
from mstarctl.start.target import find, resolve_target


def unit(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|MODEL",
            callback=bare,
            autocompletion=target_names,
            help="a deployment, as it was last started, or a model or deployment file",
        ),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="options of up for a MODEL, after --")
    ] = None,
    is_user: Annotated[bool, typer.Option("--user", help="for a user's own service manager, without root")] = False,
    run_as: Annotated[str | None, typer.Option("--run-as", metavar="USER", help="user of the system's service")] = None,
) -> None:
    """Print a systemd unit that runs a deployment."""
    printer = Printer.of(ctx)
    only_here(printer.options, "unit")
    if is_user and run_as is not None:
        raise UsageError("--user and --run-as exclude each other", hint="a user's manager runs services as that user")
    service, words = started(name) if not words and _is_started(name) else asked(name, words or [])
    text = unit_text(
        service,
        program(),
        service_words(words, Path.cwd()),
        is_system=not is_user,
        user=run_as or getpass.getuser(),
    )
    printer.item("unit", {"name": f"mstar-{service}.service", "text": text}, text.rstrip("\n").splitlines())
    printer.say(_next_step(service, is_user=is_user))


def _is_started(name: str) -> bool:
    """Return whether this host has the record of a start of this name."""
    try:
        find_known(check_name(name))
    except (ConfigError, NotFound):  # `MODEL:mini` cannot name a deployment
        return False
    return True


def started(name: str) -> tuple[str, list[str]]:
    """Return the name and the arguments of `up` of a deployment's last start."""
    folder = last_log_dir(name)
    if folder is None or not (folder / "start.json").is_file():
        raise NotFound(f"the last start of {name!r} is not recorded", hint=f"mstarctl unit MODEL -- --name {name}")
    spec = DeploymentSpec.load(folder / "start.json")
    words = list(spec.argv)
    words = words[words.index("up") + 1 :] if "up" in words else words
    return spec.name, without_replace(words, spec.name, spec.api.host, spec.api.port) if spec.replaces else words


def asked(target: str, words: list[str]) -> tuple[str, list[str]]:
    """Return the name and the arguments of `up` for a model or deployment file.

    Raises NotFound for an unknown one, ConfigError for a file that `up` would refuse.
    """
    name = resolve_target(find(target, Plugins.discover())).name
    name = next((words[at + 1] for at, word in enumerate(words[:-1]) if word == "--name"), name)
    name = next((word.partition("=")[2] for word in words if word.startswith("--name=")), name)
    return check_name(name), [target, *words]


def program() -> str:
    """Return the path of this program, which a unit needs in full."""
    beside = Path(sys.executable).parent / "mstarctl"
    path = str(beside) if beside.is_file() else shutil.which("mstarctl")
    if path is None:
        raise NotFound("the program mstarctl is not on the PATH", hint="install it, or activate its environment")
    return path


def _next_step(service: str, *, is_user: bool) -> str:
    folder = "~/.config/systemd/user" if is_user else "/etc/systemd/system"
    manager = "systemctl --user" if is_user else "systemctl"
    return f"write this to {folder}/mstar-{service}.service, then: {manager} enable --now mstar-{service}"
