"""`python -m mstarctl`: the same as the `mstarctl` script."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Console script. Ctrl-C while modules are imported ends it like any other Ctrl-C."""
    try:
        from mstarctl.main import run

        sys.exit(run())
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
