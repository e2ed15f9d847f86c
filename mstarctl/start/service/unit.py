"""Text of a systemd unit that runs one deployment. Pure functions over a command line.

The directives follow systemd.service(5), systemd.exec(5) and systemd.kill(5).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from mstar_core.errors import UsageError
from mstarctl.start.target import looks_like_file

HIDDEN: Final = "[hidden]"
"""Mark of an API key in a recorded command line."""

STOP_S: Final = 180
"""Seconds after which systemd kills what is left: the 120 s of a drain, and a margin for the end of the processes."""

SECRETS: Final = ("--api-key", "--metrics-key")
BACKGROUND: Final = ("-d", "--detach", "--wait", "--no-wait", "--dry-run")
"""Options of `up` that a service must not have: systemd follows the attached process."""

REPLACE: Final = "--replace"

SYSTEM_FOLDERS: Final = (
    "# The folders of all deployments of this host, also after one has stopped.",
    "RuntimeDirectory=mstar",
    "RuntimeDirectoryMode=0700",
    "RuntimeDirectoryPreserve=yes",
    "StateDirectory=mstar",
    "StateDirectoryMode=0700",
    "CacheDirectory=mstar",
    "CacheDirectoryMode=0700",
    "Environment=MSTAR_RUNTIME_DIR=%t/mstar XDG_STATE_HOME=%S XDG_CACHE_HOME=%C HF_HOME=%C/mstar/huggingface",
)


def service_words(words: Sequence[str], folder: Path) -> list[str]:
    """Return the arguments of `up` for a service. words: as typed in `folder`, without `up` itself.

    Relative paths of existing files become absolute, because a service starts in another folder. Raises UsageError
    for an API key on the command line: a unit file is readable by every user of the host.
    """
    for word in words:
        if word == HIDDEN or word.split("=", 1)[0] in SECRETS:
            raise UsageError(
                "a unit cannot contain an API key, because every user of the host can read it",
                hint="write the key into a file of mode 600 and use --api-key-file FILE",
            )
    kept = [word for word in words if word not in BACKGROUND]
    return [
        word if not previous.startswith("--") and _is_model(word) else _absolute(word, folder)
        for previous, word in pairwise(["", *kept])
    ]


def without_replace(words: Sequence[str], name: str, host: str, port: int) -> list[str]:
    """Return the arguments of `up` that start a deployment alone which was started with `--replace`.

    It took the name and the address of another one, which no longer runs then.
    """
    kept = [
        word
        for previous, word in pairwise(["", *words])
        if word not in (REPLACE, "--stop-first") and previous != REPLACE and not word.startswith(f"{REPLACE}=")
    ]
    return [*kept, *(() if "--name" in kept else ("--name", name)), "--host", host, "--port", str(port)]


def _is_model(word: str) -> bool:
    """Return whether a word outside options names a model of a distribution, as `mstar-orpheus/orpheus` does."""
    return not word.startswith("-") and "/" in word and not looks_like_file(word)


def _absolute(word: str, folder: Path) -> str:
    option, sign, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    if not value or value.startswith(("-", "/")):
        return word
    if (folder / value).exists() and (folder / value).suffix != "":
        return f"{option}{sign}{(folder / value).resolve()}"
    if "/" not in value:
        return word
    if not (folder / value).exists():
        raise UsageError(
            f"{value} is not in {folder}",
            "a service starts in another folder, so its paths must be absolute",
            "run mstarctl unit where the file is, or write the whole path",
        )
    return f"{option}{sign}{(folder / value).resolve()}"


def quoted(word: str) -> str:
    """Return a word as ExecStart= reads it: `%` and `$` doubled, quoted if it has blanks, quotes or backslashes."""
    plain = word.replace("%", "%%").replace("$", "$$")
    if word and not set(word) & set(" \t\"'\\;"):
        return plain
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unit_text(name: str, program: str, words: Sequence[str], *, is_system: bool, user: str) -> str:
    """Return a unit file. program: path of `mstarctl`. words: arguments of `up`.

    is_system: for the system's manager, where the service runs as `user`; else for the user's own manager.
    """
    start = " ".join(quoted(word) for word in (program, "up", *words))
    account = [f"User={user}", *SYSTEM_FOLDERS] if is_system else []
    return "\n".join(
        [
            "# Runs one deployment of mstarctl. Written by `mstarctl unit`; see docs/deploy.md.",
            "[Unit]",
            f"Description=mstarctl deployment {name}",
            "After=network-online.target",
            "Wants=network-online.target",
            "# A deployment that fails at every start is not tried for ever.",
            "StartLimitIntervalSec=600",
            "StartLimitBurst=5",
            "",
            "[Service]",
            "# Ready means that the deployment serves: `up` reports it when every process is ready.",
            "Type=notify",
            "NotifyAccess=main",
            *account,
            f"ExecStart={start}",
            f"ExecReload={quoted(program)} reload {quoted(name)}",
            "# A start has no time limit: `up` itself ends one that makes no progress.",
            "TimeoutStartSec=infinity",
            "# SIGTERM goes to `up` alone, which drains; what is left after the limit is killed.",
            "KillMode=mixed",
            f"TimeoutStopSec={STOP_S}",
            "# 130: ended by a signal, which is how systemd stops it.",
            "SuccessExitStatus=130",
            "Restart=on-failure",
            "RestartSec=5",
            "# 2 and 3: a wrong command line or file, which another start cannot mend.",
            "RestartPreventExitStatus=2 3",
            "LimitNOFILE=1048576",
            "LimitMEMLOCK=infinity",
            "LimitCORE=0",
            "NoNewPrivileges=yes",
            "ProtectSystem=full",
            "ProtectControlGroups=yes",
            "ProtectKernelTunables=yes",
            "RestrictSUIDSGID=yes",
            "",
            "[Install]",
            f"WantedBy={'multi-user.target' if is_system else 'default.target'}",
            "",
        ]
    )
