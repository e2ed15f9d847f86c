"""Download of a model's weights into the cache, in a child process. Used by `models fetch`."""

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
"""Progress callback: bytes done, bytes in total, the file."""


def fetch_weights(model: ModelSpec, *, is_tiny: bool, cache_dir: Path | None, show: Show) -> Path:
    """Return the directory of the complete weights. An unfinished download is resumed.

    Raises WeightsError for a model without a download, and the error that the plugin's code raises.
    """
    target = model.tiny if is_tiny else model.resolve
    if target is None:
        what = "embedded default checkpoint" if is_tiny else "official weights that this version can download"
        raise WeightsError(
            f"{model.name} has no {what}", hint="download the weights and use up --weights DIR", phase="fetch"
        )
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
            raise AssertionError("Popen was called with both pipes")
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
    except ValueError:  # printed by a library
        return {}
    return found if isinstance(found, dict) else {}


def _ended(end: dict[str, Any], status: int) -> Path:
    if "folder" in end:
        return Path(end["folder"])
    facts = end.get("error")
    if facts is None:
        raise WeightsError("the weights could not be downloaded", f"the process ended with exit status {status}")
    error = WeightsError(facts["title"], facts["detail"], facts["hint"], code=facts["code"])
    error.exit_code = ExitCode(facts["exit"])
    raise error
