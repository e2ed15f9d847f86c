"""The real supervisor with short pauses between restarts and without a limit on their number.

Started by `Mortal` as `python -m tests.survival.supervisor SPEC`.
"""

from __future__ import annotations

from mstar_core.supervisor.child import Pace
from mstar_core.supervisor.main import main

if __name__ == "__main__":
    main(pace=Pace(backoff_s=(0.05,), restarts_max=1_000_000, publish_s=0.05))
