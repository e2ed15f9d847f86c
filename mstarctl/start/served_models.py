"""Check of the models of a serve.yaml before a gateway starts: each needs a file that fits the devices it may use."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from mstar_core.config.files.faults import Faults
from mstar_core.errors import ConfigError, MstarError, NotFound, PluginError, UsageError
from mstar_core.gateway.fleet.local_host import set_texts
from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from mstar_core.gateway.sleep_rule import with_default
from mstarctl.output import Printer
from mstarctl.start.options import Device, UpOptions
from mstarctl.start.plan import Planned, make_planned

NEVER: Final = "gpu_memory_never"


def check_starts(serve: ServeFile, printer: Printer) -> None:
    """Plan one deployment of each model, and print the files that were chosen for the devices.

    Raises ConfigError with the place of every model that can never start as it is written. What may be mended while
    the gateway runs, such as a missing folder of weights, is a warning.
    """
    faults = Faults()
    for entry in serve.models.values():
        if entry.url is not None:
            continue
        with faults.collected():
            try:
                planned = make_planned(options_of(entry, serve), is_survey=True)
            except MstarError as error:
                if not is_lasting(error):
                    printer.warn(f"{entry.name} cannot start now: {error.title}")
                    continue
                raise fault_of(entry, error) from error
            if said := choice_text(planned):
                printer.say(f"  {entry.name}: {said}")
    faults.check()


def options_of(entry: ModelEntry, serve: ServeFile) -> UpOptions:
    """Return the options with which the gateway plans and starts a model. They match `start_words`."""
    entry = msgspec.structs.replace(entry, sleepable=None if "sleepable" in entry.set else with_default(entry, serve))
    return UpOptions(
        target=entry.target,
        config=None if entry.file is None else Path(entry.file),
        weights=None if entry.weights is None else Path(entry.weights),
        device=None if entry.device is None else Device(entry.device),
        gpus=entry.gpus,
        is_fitted=entry.file is None,
        memory=entry.memory_text,
        sets=set_texts(entry),
    )


def is_lasting(error: MstarError) -> bool:
    """Return whether only another entry, plugin or device helps."""
    return isinstance(error, ConfigError | NotFound | PluginError | UsageError) or error.code == NEVER


def fault_of(entry: ModelEntry, error: MstarError) -> ConfigError:
    """Return the error of a model with the place of its entry."""
    file, _, line = entry.source.rpartition(":")
    return ConfigError(
        f"{entry.name} cannot start: {error.title}",
        error.detail,
        error.hint,
        file=file or None,
        line=int(line) if line.isdecimal() else None,
        key=f"models.{entry.name}",
    )


def choice_text(planned: Planned) -> str:
    """Return the file that was chosen with its reason; empty if the model's own was kept."""
    path = planned.spec.config_file
    return f"{Path(path or '').name} ({planned.devices.why})" if planned.is_chosen else ""
