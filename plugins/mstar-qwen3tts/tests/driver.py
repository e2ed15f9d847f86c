"""Drives processor and talker over a case of the set, without the engine."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from mstar_qwen3tts.params import bound_params
from mstar_qwen3tts.processor import Processor

from .golden_set import Case, node

NAMES = {"speaker": "voice", "instruct": "instructions"}


class DenseCache:
    """A minimal KVView of one sequence."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        if layer in self._layers:
            key, value = (torch.cat(pair) for pair in zip(self._layers[layer], (key, value), strict=True))
        self._layers[layer] = (key, value)
        visible = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (key, value))
        return scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=visible).transpose(0, 1)


def wav(samples: Tensor, rate: int = 24000) -> bytes:
    """Return a sound as a file of 16-bit samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples.clamp(-1, 1) * 32767).round().to(torch.int16).numpy().tobytes())
    return file.getvalue()


def inputs_of(case: Case, **changes: Any) -> Inputs:
    """Return what the processor makes of a case."""
    config = case.config if case.kind is None else replace(case.config, kind=case.kind)
    processor = Processor(case.folder, {})
    processor._config = config
    call = {NAMES.get(name, name): value for name, value in case.call.items() if name not in ("method", "text")}
    media = [MediaPart(modality="audio", data=wav(case.recording))] if call.pop("ref_audio", None) else []
    params = bound_params(config)(**{**call, "do_sample": False, "subtalker_dosample": False, **changes})
    return processor.process_prompt(PromptRequest(text=case.call["text"], media=media, params=params))


@dataclass
class Spoken:
    """Results of the talker for a case. tokens: ids of group 0 with the last one, which has no frame."""

    rows: Tensor
    embeds: Tensor | None
    trailing: list[int]
    prompt: Tensor
    steps: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    frames: list[Tensor] = field(default_factory=list)


def placed(case: Case, rows: Tensor) -> tuple[Tensor, Tensor | None, Any]:
    """Return the rows of a prompt with the codes of its recording, the speaker's vector, and the recording's frames."""
    if not case.is_clone:
        return rows, None, None
    heard = node("base", "VoiceEncoder")(audio=[case.recording[None]])
    made = node("base", "VoicePrompt")(prompt=[rows], **heard)
    return made["rows"][0], made["embeds"][0], heard["frames"][0]


def spoken(case: Case) -> Spoken:
    """Speak a case greedily, up to its length."""
    made, talker = inputs_of(case), node(case.folder.name, "Talker")
    rows, embeds, _ = placed(case, torch.from_numpy(made.arrays["prompt"]))
    trailing = [int(token) for token in made.arrays.get("trailing", ())]
    found = Spoken(rows, embeds, trailing, talker.prompt_vectors(rows) + (0 if embeds is None else embeds))
    kv, count = DenseCache(), len(rows)
    out = talker(kv=kv, positions=torch.arange(count), prompt=rows, embeds=embeds)
    found.hidden.append(out["hidden"][:, :-1])
    state = {name: out[name][-1:] for name in ("last_hidden", "begun")}
    greedy = {f"subtalker_{name}": torch.zeros(1, dtype=kind) for name, kind in RULE}
    most, sizes = len(case.tensors["talker_tokens"]), case.config
    seen: set[int] = set()
    special = torch.arange(sizes.talker.vocab) >= sizes.talker.vocab - 1024
    special[sizes.codes.eos] = False
    while True:
        logits = talker.head(out["hidden"][-1:])[0]
        found.logits.append(talker.codec_head(out["hidden"][-1:, :-1])[0])
        for token in seen:
            logits[token] = logits[token] / 1.05 if logits[token] > 0 else logits[token] * 1.05
        token = int(logits.masked_fill(special, -torch.inf).argmax())
        seen.add(token)
        found.tokens.append(token)
        if token == sizes.codes.eos or len(found.tokens) == most:
            return found
        step = len(found.frames)
        text = torch.tensor([trailing[step] if step < len(trailing) else -1])
        out = talker(
            kv=kv,
            positions=torch.tensor([count + step]),
            code0=torch.tensor([token]),
            text=text,
            random=torch.zeros(1, sizes.groups - 1),
            **state,
            **greedy,
        )
        state = {name: out[name] for name in ("last_hidden", "begun")}
        found.frames.append(out["frame"][0])
        found.hidden.append(out["hidden"][:, :-1])


RULE = (("temperature", torch.float32), ("top_k", torch.int64), ("top_p", torch.float32))
