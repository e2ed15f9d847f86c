"""A module whose import does not end. It prints one line, so that a test knows when the import has begun."""

from __future__ import annotations

import signal

print("importing", flush=True)
while True:
    signal.pause()
