"""`mstarctl completion`: prints the script with which a shell completes commands and names."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

COMPLETE_VARIABLE = "_MSTARCTL_COMPLETE"


class Shell(enum.StrEnum):
    """Supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="the shell of the script")]) -> None:
    """Print the completion script of a shell.

    In bash: eval "$(mstarctl completion bash)"
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # typer re-exports it silently

    print(get_completion_script(prog_name="mstarctl", complete_var=COMPLETE_VARIABLE, shell=shell.value))
