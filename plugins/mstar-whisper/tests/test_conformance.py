"""The checks of `mstarctl plugins check whisper`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestWhisper(ModelConformance):
    plugin, model = "whisper", "whisper"
