"""Fetches a model's weights into the cache and shows how far that is. Used by `models fetch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ExitCode, WeightsError
from mstar_core.host.cache_dir import cache_root
from mstar_core.plugin import ModelSpec

CHILD: Final = "mstarctl.start.fetch_child"
Show = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and the file."""


def fetch_weights(model: ModelSpec, *, is_tiny: bool, cache_dir: Path | None, show: Show) -> Path:
    """The folder with the weights, complete. What an earlier call left unfinished is taken up where it ended.

    Raises WeightsError for a model that brings no code for it, and what the plugin's own code raises.
    """
    target = model.tiny if is_tiny else model.resolve
    if target is None:
        what = "embedded default checkpoint" if is_tiny else "official weights that this version can fetch"
        raise WeightsError(f"{model.name} has no {what}", hint="download them and use up --weights DIR", phase="fetch")
    cache = None if cache_dir is None else str(cache_dir.expanduser().absolute())
    asked = {
        "target": target,
        "cache": cache,
        "tiny_folder": str(cache_root(cache) / "tiny" / model.name) if is_tiny else None,
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(word for word in sys.path if word)}
    with subprocess.Popen(
        [sys.executable, "-m", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        if child.stdin is None or child.stdout is None:
            raise AssertionError("both pipes were asked for")
        child.stdin.write(json.dumps(asked))
        child.stdin.close()
        end: dict[str, Any] = {}
        for line in child.stdout:
            end = _object(line) or end
            if "total" in end:
                show(int(end["done"]), int(end["total"]), str(end["file"]))
    return _ended(end, child.returncode)


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:  # a library's own words
        return {}
    return found if isinstance(found, dict) else {}


def _ended(end: dict[str, Any], status: int) -> Path:
    if "folder" in end:
        return Path(end["folder"])
    facts = end.get("error")
    if facts is None:
        raise WeightsError("the weights could not be fetched", f"the process ended with exit status {status}")
    error = WeightsError(facts["title"], facts["detail"], facts["hint"], code=facts["code"])
    error.exit_code = ExitCode(facts["exit"])
    raise error
