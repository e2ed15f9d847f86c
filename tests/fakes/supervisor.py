"""The real supervisor's process with fake children: `python -m tests.fakes.supervisor SPEC`."""

from __future__ import annotations

from mstar_core.supervisor.main import main
from tests.fakes.child import fake_kinds

if __name__ == "__main__":
    main(kinds=fake_kinds)
