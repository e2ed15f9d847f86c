"""Example `mstarctl call` that `up` prints for the model it has started."""

from __future__ import annotations

from typing import Final

from mstar_core.plugin.spec import ModelSpec

GREETING: Final = "Hello there"
SENT: Final = {
    "image": "--image picture.png", "video": "--video clip.mp4",
    "audio": "--audio speech.wav",
}  # fmt: skip
RECEIVED: Final = {
    "audio": "--out hello.wav", "image": "--out picture.png", "action": "--out actions.json",
    "tensor": "--out answer.safetensors",
}  # fmt: skip


def example_call(model: ModelSpec, source: str = "") -> str:
    """Return options of `mstarctl call` for a sample of the model; empty if it has none.

    source: of the weights, `DeploymentSpec.weights_source`.
    """
    if not model.samples:
        return ""
    prompt = model.prompt_of(source)
    # A miniature's prompt describes an image where the model makes them.
    pictures = [each for each in model.samples if prompt and each.outputs == {"image"}]
    sample = (pictures or model.samples)[0]
    sent = {"text": f'--text "{prompt or GREETING}"', **SENT}
    words = [sent[kind] for kind in model.sample_inputs(sample) if kind in sent]
    if any("state" in name for name in sample.params):
        words.append("--state state.json")
    given = sample.outputs or {modality.kind for modality in model.outputs[:1]}
    return " ".join([*words, *(RECEIVED[kind] for kind in sorted(given) if kind in RECEIVED)])
