"""Runs a worker's process; started by the supervisor."""

from __future__ import annotations

import sys

from mstar_core.worker.start.early_device import open_early

open_early(sys.argv[1:])  # before PyTorch is imported

from mstar_core.worker.main import main  # noqa: E402 see above

main()
