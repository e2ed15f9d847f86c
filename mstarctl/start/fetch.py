"""Download of a model's weights into the cache, in a child process. Used by `models fetch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any, Final

from mstar_core.errors import ExitCode, WeightsError
from mstar_core.host.cache_dir import cache_root
from mstar_core.plugin import ModelSpec
from mstarctl.output.units import duration_text, size_text

STALL_S: Final = 120.0
TICK_S: Final = 1.0
CHILD: Final = "mstarctl.start.fetch_child"
Show = Callable[[int, int, str], None]
"""Progress callback: bytes done, bytes in total, the file."""


def fetch_weights(
    model: ModelSpec, *, variant: str, cache_dir: Path | None, show: Show, stall_s: float = STALL_S
) -> Path:
    """Return the directory of the complete weights. An unfinished download is resumed.

    show: called with each progress and once per second. stall_s: time without progress after which the download ends.
    Raises WeightsError for a model without a download and for a stalled one, and the error of the plugin's code.
    """
    target = model.embedded(variant) if variant else model.resolve
    if target is None:
        what = "embedded checkpoint" if variant else "official weights that this version can download"
        raise WeightsError(
            f"{model.name} has no {what}", hint="download the weights and use up --weights DIR", phase="fetch"
        )
    cache = None if cache_dir is None else str(cache_dir.expanduser().absolute())
    asked = {
        "target": target,
        "cache": cache,
        "embedded_folder": str(cache_root(cache) / variant / model.name) if variant else None,
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
        last: tuple[int, int, str] | None = None
        moved = time.monotonic()
        for line in _lines(child.stdout):
            end = _object(line) or end
            if "total" in end:
                now = (int(end["done"]), int(end["total"]), str(end["file"]))
                moved, last = (moved if now == last else time.monotonic()), now
            if last is not None:
                show(*last)
            if time.monotonic() - moved > stall_s:
                child.kill()
                raise stalled(model.name, last, stall_s)
    return _ended(end, child.returncode)


def stalled(model: str, last: tuple[int, int, str] | None, stall_s: float) -> WeightsError:
    """Return the error of a download without data. last: bytes done, bytes in total, repository and file."""
    done, total, file = last or (0, 0, model)
    arrived = f"{size_text(done)} of {size_text(total)} have arrived" if total else "nothing has arrived"
    return WeightsError(
        f"the download of {file} has stalled: no data from the network for {duration_text(stall_s)}",
        f"{arrived}; they stay in the cache, and the next start resumes" if done else arrived,
        "check the connection and HTTPS_PROXY, then run it again; or use --weights DIR",
        phase="fetch",
        code="stalled",
    )


def _lines(stream: IO[str]) -> Iterator[str]:
    """Yield the lines of a stream as they arrive, and an empty one after each second without any."""
    waiting: Queue[str | None] = Queue()

    def read() -> None:
        for line in stream:
            waiting.put(line)
        waiting.put(None)

    Thread(target=read, daemon=True).start()
    while True:
        try:
            line = waiting.get(timeout=TICK_S)
        except Empty:
            yield ""
            continue
        if line is None:
            return
        yield line


def _object(line: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:  # printed by a library
        return {}
    return message if isinstance(message, dict) else {}


def _ended(end: dict[str, Any], status: int) -> Path:
    if "folder" in end:
        return Path(end["folder"])
    facts = end.get("error")
    if facts is None:
        raise WeightsError("the weights could not be downloaded", f"the process ended with exit status {status}")
    error = WeightsError(facts["title"], facts["detail"], facts["hint"], code=facts["code"])
    error.exit_code = ExitCode(facts["exit"])
    raise error
