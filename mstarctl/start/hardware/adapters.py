"""LoRA adapters of a deployment's start: which there are, and the room that every rank reserves for them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from mstar_core.config.deployment import AdapterPlan
from mstar_core.config.resolved import LoraConfig, ResolvedConfig
from mstar_core.errors import ConfigError, UsageError, WeightsError
from mstar_core.plugin import ModelSpec
from mstar_core.weights.adapter_config import AdapterConfig

ROOM: Final = 8
LEAST_RANK: Final = 16


def named_folders(typed: list[str], flag: str) -> dict[str, str] | None:
    """Return the folders of `NAME=FOLDER` arguments by name. Raises UsageError."""
    folders = {}
    for text in typed:
        name, equals, folder = text.partition("=")
        if not equals or not name.strip() or not folder.strip():
            raise UsageError(f"{flag} {text!r} must be NAME=FOLDER", hint=f"{flag} pirate=/adapters/pirate")
        if name in folders:
            raise UsageError(f"{flag} names {name!r} twice", hint="give each adapter a name of its own")
        folders[name] = str(Path(folder).expanduser().absolute())
    return folders or None


def plan_adapters(model: ModelSpec, config: ResolvedConfig) -> tuple[LoraConfig, tuple[AdapterPlan, ...]]:
    """Return the configuration of LoRA with its defaults decided, and the adapters of the start.

    Raises ConfigError for a model that takes no adapters, for more than there is room for, and for one that is not
    supported.
    """
    lora = config.lora
    if not lora.adapters and not lora.max_adapters:
        return lora, ()
    if all(node.adapter_prefix is None for node in model.nodes):
        key = "lora.adapters" if lora.adapters else "lora.max_adapters"
        raise config.error(key, f"{model.name} takes no LoRA adapters", hint="remove the key, or choose another model")
    taken = {model.name, config.name, *model.aliases}
    plans = []
    for row, (name, text) in enumerate(lora.adapters.items()):
        if name in taken:
            title = f"an adapter cannot have the model's name {name!r}"
            raise config.error("lora.adapters", title, hint="choose another name")
        folder = Path(text).expanduser().absolute()
        settings = _read(config, name, folder)
        plans.append(
            AdapterPlan(number=row + 1, row=row, name=name, folder=str(folder), rank=settings.rank, base=settings.base)
        )
    count = max(ROOM, len(plans)) if lora.max_adapters is None else lora.max_adapters
    if len(plans) > count:
        title = f"{len(plans)} adapters do not fit into the room for {count}"
        raise config.error(
            "lora.max_adapters", title, hint=f"set lora.max_adapters to {len(plans)}", at="lora.adapters"
        )
    largest = max((plan.rank for plan in plans), default=0)
    if lora.max_rank is not None and largest > lora.max_rank:
        title = f"an adapter has rank {largest}, and lora.max_rank is {lora.max_rank}"
        raise config.error("lora.max_rank", title, hint=f"set lora.max_rank to {largest}")
    rank = max(LEAST_RANK, largest) if lora.max_rank is None else lora.max_rank
    return msgspec.structs.replace(lora, max_adapters=count, max_rank=rank), tuple(plans)


def _read(config: ResolvedConfig, name: str, folder: Path) -> AdapterConfig:
    try:
        return AdapterConfig.read(folder)
    except WeightsError as error:
        raise _at(config, name, error) from None


def _at(config: ResolvedConfig, name: str, error: WeightsError) -> ConfigError:
    return config.error("lora.adapters", f"adapter {name!r}: {error.title}", error.detail, error.hint)
