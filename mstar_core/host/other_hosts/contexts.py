"""Contexts: `local` and named hosts that ssh reaches. Stored in one file of the user.

Used by commands, and by gateways for the hosts of serve.yaml.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mstar_core.config.name import is_name
from mstar_core.errors import ConfigError, NotFound, UsageError, did_you_mean

LOCAL: Final = "local"
_HOST: Final = re.compile(r"[A-Za-z0-9_][^\s\x00-\x1f]{0,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One host. ssh: destination for ssh, None for this host. socket: the admin socket there, if fixed."""

    name: str
    ssh: str | None = None
    socket: str | None = None

    @property
    def is_local(self) -> bool:
        return self.ssh is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """Every context of this user and the one in use. Immutable; `save` writes it."""

    current: str = LOCAL
    remote: Mapping[str, Context] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Contexts:
        """Read the file; without a file only `local` exists. Raises ConfigError for a damaged file."""
        path = contexts_file()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            remote = {name: _context(name, facts) for name, facts in content["contexts"].items()}
            return cls(current=str(content["current"]), remote=remote)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} cannot be read",
                str(error),
                "repair it, or remove it and add the contexts again",
                file=str(path),
            ) from error

    def save(self) -> None:
        """Write the file, readable only by its owner. Raises ConfigError."""
        path = contexts_file()
        facts = {name: {"ssh": item.ssh, "socket": item.socket} for name, item in self.remote.items()}
        text = json.dumps({"current": self.current, "contexts": facts}, indent=1)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(text + "\n")
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written", error.strerror or str(error), file=str(path)) from error

    def all(self) -> list[Context]:
        """Return `local` and the others, sorted by name."""
        return [Context(name=LOCAL), *(self.remote[name] for name in sorted(self.remote))]

    def get(self, name: str) -> Context:
        """Return a context by name. Raises NotFound with the nearest name."""
        context = next((item for item in self.all() if item.name == name), None)
        if context is None:
            known = [item.name for item in self.all()]
            raise NotFound(f"no context {name!r}", hint=did_you_mean(name, known), kind="context", name=name)
        return context

    def added(self, context: Context) -> Contexts:
        """Return a copy with one more context. Raises UsageError for a taken name and for an invalid host."""
        if context.name == LOCAL or context.name in self.remote:
            raise UsageError(f"context {context.name!r} already exists", hint=f"mstarctl context rm {context.name}")
        if not is_name(context.name):
            raise UsageError(
                f"{context.name!r} is not a valid context name", hint="use letters, digits, '.', '_' and '-'"
            )
        if context.ssh is None or not _HOST.fullmatch(context.ssh):
            raise UsageError(f"--ssh is {context.ssh!r}", hint="write HOST or USER@HOST, as for ssh")
        return replace(self, remote={**self.remote, context.name: context})

    def removed(self, name: str) -> Contexts:
        """Return a copy without a context; `local` replaces one in use. Raises NotFound, and UsageError for `local`."""
        if name == LOCAL:
            raise UsageError("local is built in and cannot be removed")
        self.get(name)
        rest = {key: item for key, item in self.remote.items() if key != name}
        return replace(self, remote=rest, current=LOCAL if self.current == name else self.current)

    def chosen(self, asked: str | None) -> Context:
        """Return the context of a command line: `-c NAME`, else the one in use. Raises NotFound."""
        return self.get(self.current if asked is None else asked)


def contexts_file() -> Path:
    """Return $XDG_CONFIG_HOME/mstar/contexts.json, with ~/.config as the default base."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "mstar" / "contexts.json"


def _context(name: str, facts: Mapping[str, Any]) -> Context:
    socket = facts.get("socket")
    return Context(name=name, ssh=str(facts["ssh"]), socket=None if socket is None else str(socket))
