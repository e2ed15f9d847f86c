"""Loaded by Python at the start of each process of a deployment under test: installs strikes in its children."""

from __future__ import annotations

import sys

if "mstar_core.process.entry" in sys.orig_argv:
    from tests.survival.strikes import install

    install()
