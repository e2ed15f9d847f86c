"""`python -m mstarctl`: the same as the `mstarctl` script."""

from __future__ import annotations

import sys

from mstarctl.main import run

if __name__ == "__main__":
    sys.exit(run())
