"""Plain computation of greedy speech, for the gold checks. A development tool: no process serves with it.

Each step reads the whole sequence again, without caches, and the codec decodes all frames at once, in float32. Written
from the specification, whose sections are named, on the tensors of the files. Shares with the model only the processor
and its rows of a prompt. Values over time are [T, width] in transformers and [channels, T] in convolutions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import conv1d, conv_transpose1d, gelu, layer_norm, linear, pad, silu

from mstar_core.errors import PluginError
from mstar_core.plugin.check.reference import ReferenceRequest
from mstar_qwen3tts.program import VOICE
from mstar_qwen3tts.reference_layers import Sizes, Weights, codebook, transformer
from mstar_qwen3tts.reference_voice import codes_of, speaker_vector
from mstar_qwen3tts.request.prompt import FRAME, SPEAKER

SPECIAL_CODES: Final = 1024
"""Ids at the top of the talker's vocabulary that are not codes (section 10)."""

PREDICTOR: Final = "talker.code_predictor"


@torch.no_grad()
def reference(folder: Path, request: ReferenceRequest) -> Mapping[str, npt.NDArray[Any]]:
    """Return {"pcm": int16 samples}. Raises PluginError for a request that samples its codes."""
    params = request.params
    if params.temperature or params.subtalker_temperature:
        hint = "set temperature and subtalker_temperature to 0"
        raise PluginError("the reference of qwen3_tts takes the most likely codes only", hint=hint)
    codec_folder = folder / "speech_tokenizer"
    config, codec = (json.loads((each / "config.json").read_text("utf-8")) for each in (folder, codec_folder))
    files = load_file(folder / "model.safetensors") | load_file(codec_folder / "model.safetensors")
    w = {name: value.float() for name, value in files.items()}
    speaker, heard = torch.zeros(()), torch.zeros(0, config["talker_config"]["num_code_groups"], dtype=torch.int64)
    for segment in request.segments:
        clip = torch.from_numpy(segment.arrays["audio"]).flatten()
        speaker = speaker_vector(w, config["speaker_encoder_config"], clip)
        heard = codes_of(w, codec, clip) if segment.kind == VOICE else heard
    prompt = prompt_vectors(w, torch.from_numpy(request.arrays["prompt"]), speaker, heard)
    trailing = [int(token) for token in request.arrays.get("trailing", ())]
    frames = torch.cat([heard, spoken(w, config, prompt, trailing, params)])
    samples = sound(w, codec["decoder_config"], frames)
    own = samples[len(samples) // len(frames) * len(heard) :]
    return {"pcm": (own * 32767).round().to(torch.int16).numpy()}


# -- talker and code predictor ---------------------------------------------------------------------------------------


def text_vectors(w: Weights, ids: Tensor) -> Tensor:
    """T of section 6: fc2(silu(fc1(embedding)))."""
    at = "talker.text_projection.linear_fc"
    inner = silu(linear(w["talker.model.text_embedding.weight"][ids], w[f"{at}1.weight"], w[f"{at}1.bias"]))
    return linear(inner, w[f"{at}2.weight"], w[f"{at}2.bias"])


def code_vector(w: Weights, group: int, code: int) -> Tensor:
    """E of section 6 for group 0, E_g for the others."""
    own = f"{PREDICTOR}.model.codec_embedding.{group - 1}" if group else "talker.model.codec_embedding"
    return w[f"{own}.weight"][code]


def frame_vector(w: Weights, codes: list[int]) -> Tensor:
    """S of section 6: the sum over the groups."""
    return torch.stack([code_vector(w, group, code) for group, code in enumerate(codes)]).sum(0)


def prompt_vectors(w: Weights, rows: Tensor, speaker: Tensor, heard: Tensor) -> Tensor:
    """Return a text vector and a codec vector, summed, for each row of `request.prompt` (section 6)."""
    vectors = text_vectors(w, rows[:, 0])
    for at, code in enumerate(rows[:, 1].tolist()):
        if code <= FRAME:
            vectors[at] += frame_vector(w, heard[FRAME - code].tolist())
        elif code == SPEAKER:
            vectors[at] += speaker
        elif code >= 0:
            vectors[at] += code_vector(w, 0, code)
    return vectors


def spoken(w: Weights, config: Sizes, x: Tensor, trailing: list[int], params: Any) -> Tensor:
    """Return the frames of a speech, int64 [n, groups] (sections 9 and 10). x: vectors of the prompt."""
    sizes, ids, frames = config["talker_config"], list[int](), list[list[int]]()
    eos, vocab = sizes["codec_eos_token_id"], sizes["vocab_size"]
    while len(frames) < params.max_output_tokens:
        hidden = transformer(w, "talker.model", x, sizes)[-1]
        logits = w["talker.codec_head.weight"] @ hidden
        for seen in set(ids):
            penalty = params.repetition_penalty
            logits[seen] = logits[seen] / penalty if logits[seen] > 0 else logits[seen] * penalty
        is_open = len(ids) >= 2 and not params.ignore_eos
        barred = [code for code in range(vocab - SPECIAL_CODES, vocab) if code != eos or not is_open]
        logits[barred] = -math.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == eos:
            break
        token = trailing[len(frames)] if len(frames) < len(trailing) else config["tts_pad_token_id"]
        frames.append(completed(w, sizes, hidden, ids[-1]))
        following = frame_vector(w, frames[-1]) + text_vectors(w, torch.tensor(token))
        x = torch.cat([x, following[None]])
    return torch.tensor(frames, dtype=torch.int64)


def completed(w: Weights, talker: Sizes, hidden: Tensor, first: int) -> list[int]:
    """Return the codes of a frame by the code predictor (section 8). hidden: of the talker, after its last norm."""
    codes, inputs, narrow = [first], [hidden], f"{PREDICTOR}.small_to_mtp_projection"
    for group in range(talker["num_code_groups"] - 1):
        inputs.append(code_vector(w, group, codes[-1]))
        x = torch.stack(inputs)
        if f"{narrow}.weight" in w:
            x = linear(x, w[f"{narrow}.weight"], w[f"{narrow}.bias"])
        last = transformer(w, f"{PREDICTOR}.model", x, talker["code_predictor_config"])[-1]
        codes.append(int((w[f"{PREDICTOR}.lm_head.{group}.weight"] @ last).argmax()))
    return codes


# -- codec: frames to sound (section 11) -----------------------------------------------------------------------------


def sound(w: Weights, sizes: Sizes, frames: Tensor) -> Tensor:
    """Return all samples in [-1, 1]. frames: int64 [n, groups]."""
    x = torch.zeros(())
    for kind, codes in (("first", frames.T[:1]), ("rest", frames.T[1:])):
        own = f"decoder.quantizer.rvq_{kind}"
        books = (f"{own}.vq.layers.{level}._codebook" for level in range(len(codes)))
        vectors = sum(codebook(w, book, "embedding_sum")[each] for book, each in zip(books, codes, strict=True))
        x = x + conv1d(torch.as_tensor(vectors).T, w[f"{own}.output_proj.weight"])
    x = causal(w, "decoder.pre_conv.conv", x)
    at = "decoder.pre_transformer"
    inner = linear(x.T, w[f"{at}.input_proj.weight"], w[f"{at}.input_proj.bias"])
    inner = transformer(w, at, inner, sizes, sizes["sliding_window"])
    x = linear(inner, w[f"{at}.output_proj.weight"], w[f"{at}.output_proj.bias"]).T
    for stage, rate in enumerate(sizes["upsampling_ratios"]):
        x = convnext(w, f"decoder.upsample.{stage}.1", upsampled(w, f"decoder.upsample.{stage}.0.conv", x, rate))
    x = causal(w, "decoder.decoder.0.conv", x)
    for stage, rate in enumerate(sizes["upsample_rates"], start=1):
        block = f"decoder.decoder.{stage}.block"
        x = upsampled(w, f"{block}.1.conv", snake(w, f"{block}.0", x), rate)
        for unit, dilation in ((2, 1), (3, 3), (4, 9)):
            own = f"{block}.{unit}"
            inner = causal(w, f"{own}.conv1.conv", snake(w, f"{own}.act1", x), dilation)
            x = x + causal(w, f"{own}.conv2.conv", snake(w, f"{own}.act2", inner))
    last = len(sizes["upsample_rates"]) + 1
    return causal(w, f"decoder.decoder.{last + 1}.conv", snake(w, f"decoder.decoder.{last}", x))[0].clamp(-1, 1)


def causal(w: Weights, at: str, x: Tensor, dilation: int = 1, groups: int = 1) -> Tensor:
    """Convolution with zeros on the left."""
    weight = w[f"{at}.weight"]
    x = pad(x, ((weight.shape[2] - 1) * dilation, 0))
    return conv1d(x, weight, w[f"{at}.bias"], dilation=dilation, groups=groups)


def upsampled(w: Weights, at: str, x: Tensor, rate: int) -> Tensor:
    """Transposed convolution without its last samples, which would be of the next input."""
    return conv_transpose1d(x, w[f"{at}.weight"], w[f"{at}.bias"], rate)[:, : x.shape[1] * rate]


def snake(w: Weights, at: str, x: Tensor) -> Tensor:
    """x + sin²(x e^alpha) / e^beta."""
    alpha, beta = (w[f"{at}.{name}"].exp()[:, None] for name in ("alpha", "beta"))
    return x + (x * alpha).sin().square() / (beta + 1e-9)


def convnext(w: Weights, at: str, x: Tensor) -> Tensor:
    """x + gamma * pointwise(gelu(pointwise(norm(depthwise))))."""
    inner = causal(w, f"{at}.dwconv.conv", x, groups=len(x)).T
    inner = layer_norm(inner, inner.shape[1:], w[f"{at}.norm.weight"], w[f"{at}.norm.bias"], 1e-6)
    inner = gelu(linear(inner, w[f"{at}.pwconv1.weight"], w[f"{at}.pwconv1.bias"]))
    return x + (linear(inner, w[f"{at}.pwconv2.weight"], w[f"{at}.pwconv2.bias"]) * w[f"{at}.gamma"]).T
