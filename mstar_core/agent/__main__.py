"""`python -m mstar_core.agent [--detach] [ORDER_JSON]`."""

from __future__ import annotations

from mstar_core.agent.main import main

if __name__ == "__main__":
    main()
