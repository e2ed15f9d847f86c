"""Token counts of text chunks for servers that give none: by a tokenizer file (`--tokenizer`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from mstar_core.errors import ConfigError, UsageError

FILE: Final = "tokenizer.json"

TokenCounter = Callable[[str], int]
"""From a text to its number of tokens."""


def token_counter(folder: Path) -> TokenCounter:
    """Return the counter of a checkpoint folder, or of a tokenizer.json.

    Raises ConfigError if there is no such file or it cannot be read, and UsageError without the package.
    """
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise ConfigError(f"--tokenizer: {path} does not exist", hint=f"a folder with {FILE}", file=str(path))
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError("--tokenizer needs the package tokenizers", hint="pip install tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f"--tokenizer: {path} is not a tokenizer", str(error), file=str(path)) from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
