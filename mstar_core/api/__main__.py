"""Entry point of `python -m mstar_core.api`. Imports nothing at the top: pool processes import this module too."""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from mstar_core.api.main import main

    sys.exit(main())
