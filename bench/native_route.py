"""Cost of a decode step's bookkeeping in C beside that in Python: routing of ids to streams and codec windows.

Run from the repository root: `python bench/native_route.py [--streams 1,8,32,64] [--rounds 5] [--out FILE]`. Needs gcc.
The C side does what `bench/worker_step.py` makes the worker do per step with the codec left out: it checks each id,
appends it to its stream, tells which windows are due, copies their ids and writes a message head for each. Both run in
turn in one process; minima of CPU time are compared. It is a lower bound for a native core: there are no requests that
come and go, no faults, no traces.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.serving.figures import head
from bench.worker_step import FIRST_AUDIO_ID, IDS_PER_FRAME, measure

STEPS: Final = 20_000
SOURCE: Final = r"""
#include <stdint.h>
#include <string.h>
enum { WINDOW = 28, FRAME = 7, KEPT = 64, HEAD = 48 };
typedef struct { int64_t ids[2 * KEPT]; int64_t count, due, sequence; } Stream;
static Stream streams[1024];
static unsigned char outbox[1 << 20];

void start(int64_t n) {
    memset(streams, 0, sizeof(streams));
    for (int64_t i = 0; i < n; i++) streams[i].due = WINDOW;
}

/* Take one id for each stream. Copies the ids of due windows and returns how many there are. */
int64_t route(const int64_t *keys, const int64_t *ids, int64_t n, int64_t low, int64_t high, int64_t *windows) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        Stream *s = &streams[keys[i]];
        if (ids[i] < low || ids[i] >= high) continue;
        int64_t at = s->count++ % KEPT;
        s->ids[at] = s->ids[at + KEPT] = ids[i];
        if (s->count < s->due) continue;
        s->due += FRAME;
        memcpy(windows + found * WINDOW, s->ids + (s->count - WINDOW) % KEPT, WINDOW * sizeof(int64_t));
        unsigned char *head = outbox + found * HEAD;
        memcpy(head, &keys[i], 8);
        memcpy(head + 8, &s->sequence, 8);
        s->sequence++;
        found++;
    }
    return found;
}
"""


def compiled(folder: Path) -> ctypes.CDLL:
    """Return the C side as a library."""
    source, library = folder / "route.c", folder / "route.so"
    source.write_text(SOURCE, encoding="utf-8")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def native_us(library: ctypes.CDLL, streams: int) -> float:
    """Return the microseconds of CPU of one step in C, its call from Python included."""
    pointer = ctypes.POINTER(ctypes.c_int64)
    keys, windows = np.arange(streams, dtype=np.int64), np.zeros((streams, 28), dtype=np.int64)
    ids = np.full(streams, FIRST_AUDIO_ID, dtype=np.int64)
    given = [each.ctypes.data_as(pointer) for each in (keys, ids, windows)]
    low, high = ctypes.c_int64(FIRST_AUDIO_ID), ctypes.c_int64(FIRST_AUDIO_ID + 7 * 4096)
    library.start(ctypes.c_int64(streams))
    count, found = ctypes.c_int64(streams), 0
    start = time.process_time()
    for _ in range(STEPS):
        found += library.route(given[0], given[1], count, low, high, given[2])
    taken = time.process_time() - start
    assert found == streams * ((STEPS - 28) // IDS_PER_FRAME + 1), "each stream has a window of 28 ids every 7"
    return 1e6 * taken / STEPS


def main() -> None:
    """Measure both sides and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mstar-") as folder:
        library = compiled(Path(folder))
        for streams in map(int, options.streams.split(",")):
            python, native = [], []
            for _ in range(options.rounds):
                python.append(measure(streams, 40, Path(folder))["us_per_step_without_windows_done"])
                native.append(native_us(library, streams))
            found[str(streams)] = {"python_us": min(python), "native_us": round(min(native), 3), "n": options.rounds}
    report = {**head(), "us_per_step": found}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
