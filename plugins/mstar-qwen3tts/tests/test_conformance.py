"""The checks of `mstarctl plugins check qwen3_tts`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestQwen3TTS(ModelConformance):
    plugin, model = "qwen3_tts", "qwen3_tts"


class TestQwen3TTSBase(ModelConformance):
    plugin, model = "qwen3_tts", "qwen3_tts_base"
