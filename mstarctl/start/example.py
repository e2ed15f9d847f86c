"""Example `mstarctl call` that `up` prints for the model it has started."""

from __future__ import annotations

from typing import Final

from mstar_core.plugin.spec import ModelSpec

SENT: Final = {
    "text": '--text "Hello there"', "image": "--image picture.png", "video": "--video clip.mp4",
    "audio": "--audio speech.wav",
}  # fmt: skip
RECEIVED: Final = {
    "audio": "--out hello.wav", "image": "--out picture.png", "action": "--out actions.json",
    "tensor": "--out answer.safetensors",
}  # fmt: skip


def example_call(model: ModelSpec) -> str:
    """Return options of `mstarctl call` for the model's first sample; empty if it has none."""
    if not model.samples:
        return ""
    sample = model.samples[0]
    words = [SENT[kind] for kind in model.sample_inputs(sample) if kind in SENT]
    if any("state" in name for name in sample.params):
        words.append("--state state.json")
    given = sample.outputs or {modality.kind for modality in model.outputs[:1]}
    return " ".join([*words, *(RECEIVED[kind] for kind in sorted(given) if kind in RECEIVED)])
