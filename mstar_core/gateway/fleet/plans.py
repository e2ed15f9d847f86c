"""Plans of models that are kept in a file, so that a model that `mstarctl serve` has planned is not planned again.

A plan holds until the entry, its files, the devices or mstarctl change. Used by gateways, agents and the command.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.host.gpu_locks import MemoryClaim
from mstar_core.host.hardware.fake_memory import VARIABLE
from mstar_core.host.hardware.gpus import gpus
from mstar_core.host.private_files import write_private
from mstar_core.version import __version__

FILE: Final = "plans.json"
MOST: Final = 256
"""Plans in the file; older ones are dropped."""

AUTO: Final = "auto"
ENVIRONMENT: Final = ("CUDA_VISIBLE_DEVICES", VARIABLE)

Plan = Mapping[str, Any]
"""The item that `mstarctl plan -o json` prints."""


class KeptPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan. config: stamp of the deployment file that it names."""

    need: Need
    config: str


class KeptPlans:
    """The file of plans of a user. folder: of the gateways, which exists or is made."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def find(self, entry: ModelEntry, words: Sequence[str]) -> Need | None:
        """Return the plan of an entry, None if there is none for its files and devices as they are. Reads files.

        words: of the entry, as `up` and `plan` take them.
        """
        kept = self._read().get(_key(entry, words))
        return None if kept is None or kept.config != _stamp(kept.need.config) else kept.need

    def keep(self, entry: ModelEntry, words: Sequence[str], need: Need) -> None:
        """Keep a plan. A folder that cannot be written keeps none."""
        plans = self._read()
        key = _key(entry, words)
        plans.pop(key, None)
        plans[key] = KeptPlan(need=need, config=_stamp(need.config))
        newest = dict(list(plans.items())[-MOST:])
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path, msgspec.json.encode(newest))

    def _read(self) -> dict[str, KeptPlan]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, KeptPlan])
        except (OSError, msgspec.MsgspecError):  # the first plan, or a file of another version
            return {}


def surveyed(entry: ModelEntry, plan: Callable[[str], Plan]) -> Need:
    """Return the memory of one deployment. plan: plans it with a budget, none if that is empty; raises MstarError.

    Without a budget in the entry it is planned; a model whose size is unknown then takes whole devices.
    """
    if entry.memory_text is not None:
        return _need(plan(entry.memory_text), entry.memory_text)
    whole = plan("")
    if whole["memory"]:
        with suppress(MstarError):
            return _need(plan(AUTO), AUTO)
    return _need(whole, "")


def _need(plan: Plan, budget: str) -> Need:
    claims = {
        each["key"]: MemoryClaim(device=each["device"], need_bytes=each["takes_bytes"], total_bytes=each["total_bytes"])
        for each in plan["memory"]
    }
    return Need(
        claims=claims,
        budget=budget if claims else "",
        can_sleep=bool(plan.get("can_sleep", True)),
        config=str(plan.get("config") or ""),
        why=str(plan.get("why") or ""),
    )


def _key(entry: ModelEntry, words: Sequence[str]) -> str:
    """Return a digest of what a plan depends on: the entry, its files, the devices, and this version."""
    files = [_stamp(path) for path in (entry.file, entry.weights, entry.target) if path is not None]
    devices = [(gpu.name, gpu.uuid, gpu.total) for gpu in gpus()]
    environment = [os.environ.get(name, "") for name in ENVIRONMENT]
    facts = (__version__, *words, entry.memory_text, files, devices, environment)
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _stamp(path: str) -> str:
    """Return size and time of a file, or of the files in a folder; empty without one."""
    return " ".join(f"{facts.st_size}@{facts.st_mtime_ns}" for facts in _facts(Path(path))) if path else ""


def _facts(path: Path) -> Iterator[os.stat_result]:
    with suppress(OSError):
        for each in sorted(path.iterdir()) if path.is_dir() else [path]:
            yield each.stat()
