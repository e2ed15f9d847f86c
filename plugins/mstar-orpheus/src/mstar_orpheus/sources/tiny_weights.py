"""Files of the tiny checkpoint: language model, byte-level tokenizer and vocoder, in the published layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mstar_orpheus.checkpoint.config import IDS_KEY, IDS_PER_FRAME, VQ_STRIDES
from mstar_orpheus.vocoder.snac import Snac, SnacConfig, decoding_weights

if TYPE_CHECKING:
    from torch import Tensor

CODEBOOK: Final = 256
MERGES: Final = (
    "Ġ t",
    "h e",
    "Ġt he",
    "i n",
    "e r",
    "o n",
    "r e",
    "Ġ a",
    "a n",
    "Ġ s",
    "o u",
    "Ġ w",
    "i s",
    "a t",
    "e n",
    "Ġ o",
    "in g",
    "Ġ b",
    "Ġ c",
    "n d",
    "o r",
    "e s",
    "Ġ f",
    "Ġ m",
    "i t",
    "a r",
    "Ġ d",
    "Ġ h",
    "Ġ p",
    "l l",
    "Ġt o",
    "y ou",
    "s t",
    "l e",
    "Ġ in",
    "Ġa nd",
    "e d",
    "Ġ i",
    "Ġo f",
    "v e",
    "a l",
    "o m",
    "Ġ he",
    "l o",
    "he llo",
    "he l",
    "hel lo",
    "l y",
)
SPECIALS: Final = 256
NAMED: Final = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
CUSTOM: Final = 10
HIDDEN: Final = 64
LAYERS: Final = 2
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 16
MLP: Final = 128

# Residual dimensions with a meaning. The others are random.
ONE: Final = 0  # constant, so that the head can have a bias
IS_TEXT: Final = 1  # set in the embeddings of text and control ids
TEXT_SHARE: Final = 2  # share of prompt ids in the sequence so far: the clock
SLOT: Final = 3  # 7 dimensions, one-hot: the slot of this id
FREE: Final = SLOT + IDS_PER_FRAME


def write_lm(folder: Path) -> None:
    """Write the folder of the language model in the layout of the official repository."""
    folder.mkdir()
    tokens = text_tokens()
    text_vocab = len(tokens)
    first_custom = text_vocab + SPECIALS
    audio_offset = first_custom + CUSTOM
    vocab = audio_offset + IDS_PER_FRAME * CODEBOOK + 2
    _write_json(folder / "config.json", _config(vocab, text_vocab))
    generation = {"bos_token_id": text_vocab, "eos_token_id": first_custom + 2, "do_sample": True}
    _write_json(folder / "generation_config.json", generation)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": NAMED[0]}
    _write_json(folder / "tokenizer_config.json", named)
    _tokenizer(tokens).save(str(folder / "tokenizer.json"))
    _write_weights(folder, _weights(vocab, audio_offset, first_custom + 2))


def text_tokens() -> dict[str, int]:
    """Return the byte alphabet, then one token per merge."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    for pair in _merges():
        tokens.append("".join(pair))
    return {token: index for index, token in enumerate(tokens)}


def _merges() -> list[tuple[str, str]]:
    known, kept = set(pre_tokenizers.ByteLevel.alphabet()), []
    for text in MERGES:
        left, right = text.split()
        if left in known and right in known and left + right not in known:
            kept.append((left, right))
            known.add(left + right)
    return kept


def _tokenizer(tokens: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=_merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [NAMED.get(index, f"<|reserved_special_token_{index}|>") for index in range(SPECIALS)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    custom = [f"<custom_token_{index}>" for index in range(CUSTOM + IDS_PER_FRAME * CODEBOOK + 2)]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in custom])
    bos = (specials[0], len(tokens))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def _config(vocab: int, text_vocab: int) -> dict[str, object]:
    custom = text_vocab + SPECIALS
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "bos_token_id": text_vocab,
        "eos_token_id": custom + 2,
        IDS_KEY: {
            "start_token_id": custom + 3,
            "end_token_ids": [text_vocab + 9, custom + 4, custom + 5, custom + 1],
            "stop_token_id": custom + 2,
            "audio_token_offset": custom + CUSTOM,
        },
    }


def _weights(vocab: int, audio_offset: int, stop: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2024)
    audio = slice(audio_offset, audio_offset + IDS_PER_FRAME * CODEBOOK)
    weights = {"model.embed_tokens.weight": _embeddings(vocab, audio, generator)}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        weights |= {f"model.layers.{layer}.{name}": value for name, value in _layer(layer, generator).items()}
    weights["lm_head.weight"] = _head(vocab, audio, stop, generator)
    return weights


def _slots(audio: slice) -> Tensor:
    return torch.arange(IDS_PER_FRAME).repeat_interleave((audio.stop - audio.start) // IDS_PER_FRAME)


def _one_hot(slots: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(slots, IDS_PER_FRAME).float()


def _embeddings(vocab: int, audio: slice, generator: torch.Generator) -> Tensor:
    """Return rows of norm sqrt(HIDDEN), which the first RMSNorm leaves unchanged."""
    table = torch.zeros(vocab, HIDDEN)
    table[:, ONE] = 3.0
    table[:, IS_TEXT] = 2.0
    table[audio, IS_TEXT] = 0.0
    table[:, SLOT + IDS_PER_FRAME - 1] = 3.0  # after the prompt comes slot 0, as after slot 6
    table[audio, SLOT : SLOT + IDS_PER_FRAME] = 3.0 * _one_hot(_slots(audio))
    rest: Tensor = torch.randn(vocab, HIDDEN - FREE, generator=generator)
    room = HIDDEN - table.square().sum(1, keepdim=True)
    table[:, FREE:] = rest * (room / rest.square().sum(1, keepdim=True)).sqrt()
    return table


def _layer(layer: int, generator: torch.Generator) -> dict[str, Tensor]:
    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))

    width = HEADS * HEAD_DIM
    value, output, down = normal(KV_HEADS * HEAD_DIM, HIDDEN, 1.0), normal(HIDDEN, width, 0.5), normal(HIDDEN, MLP, 0.5)
    query, key = normal(width, HIDDEN, 2.0), normal(KV_HEADS * HEAD_DIM, HIDDEN, 2.0)
    output[:FREE] = 0.0
    down[:FREE] = 0.0
    if layer == 0:  # head 0 attends uniformly, so it measures the share of text: the clock
        query[:HEAD_DIM] = 0.0
        value[0] = 0.0
        value[0, IS_TEXT] = 0.5
        output[:, 0] = 0.0
        output[TEXT_SHARE, 0] = 4.0
    return {
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": output,
        "mlp.gate_proj.weight": normal(MLP, HIDDEN, 1.0),
        "mlp.up_proj.weight": normal(MLP, HIDDEN, 1.0),
        "mlp.down_proj.weight": down,
    }


def _head(vocab: int, audio: slice, stop: int, generator: torch.Generator) -> Tensor:
    """Return a head that favours audio ids of the next slot, then the stop id once the share of text is small."""
    head = torch.zeros(vocab, HIDDEN)
    head[:, ONE] = -4.0
    head[audio, ONE] = 0.6
    before = (_slots(audio) - 1) % IDS_PER_FRAME
    head[audio, SLOT : SLOT + IDS_PER_FRAME] = 2.0 * _one_hot(before)
    head[audio, FREE:] = torch.randn(audio.stop - audio.start, HIDDEN - FREE, generator=generator) * 0.2
    head[stop] = 0.0
    head[stop, ONE] = 3.8
    head[stop, TEXT_SHARE] = -6.0
    return head


def _write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    names = sorted(weights)
    shards = [names[: len(names) // 2], names[len(names) // 2 :]]
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: weights[name].contiguous() for name in shard}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(value.numel() * value.element_size() for value in weights.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


LOUDNESS: Final = 0.15
"""Root mean square of the sound, with full scale 1: audible, and far from clipping."""


def write_snac(folder: Path) -> None:
    """Write the folder of the vocoder in the layout of the official repository."""
    folder.mkdir()
    config = {
        "sampling_rate": 24000,
        "encoder_dim": 4,
        "encoder_rates": [2, 4, 8, 8],
        "decoder_dim": 32,
        "decoder_rates": [8, 8, 4, 2],
        "attn_window_size": None,
        "codebook_size": CODEBOOK,
        "codebook_dim": 8,
        "vq_strides": list(VQ_STRIDES),
        "noise": True,
        "depthwise": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    torch.save(_state(SnacConfig.read(folder / "config.json")), folder / "pytorch_model.bin")


def _state(config: SnacConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(24000)
    shapes = {name: value.shape for name, value in Snac(config).state_dict().items()}
    state: dict[str, Tensor] = {}
    for name, shape in sorted(shapes.items()):
        state |= _random(name, shape, generator)
    state[_gain("decoder.model.7")] *= 1e-3  # measured in the linear range of tanh
    state[_gain("decoder.model.7")] *= LOUDNESS / _loudness(config, state)
    return state


def _gain(stem: str) -> str:
    return f"{stem}.parametrizations.weight.original0"


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> dict[str, Tensor]:
    value = torch.randn(shape, generator=generator)
    if name.endswith("alpha"):
        return {name: 0.5 + value.abs()}
    if name.endswith("bias"):
        return {name: value * 0.02}
    if name.endswith("codebook.weight"):
        return {name: value}
    stem = name.removesuffix(".weight")
    scale = 0.3 if stem.endswith("linear") else 1.0
    gain = torch.full((shape[0], *[1] * (len(shape) - 1)), scale)
    return {_gain(stem): gain, f"{stem}.parametrizations.weight.original1": value}


@torch.inference_mode()
def _loudness(config: SnacConfig, state: dict[str, Tensor]) -> float:
    """Return the root mean square of a second of random codes, to three digits, to be equal on every machine."""
    snac = Snac(config)
    snac.load_state_dict(decoding_weights(state))
    generator = torch.Generator().manual_seed(0)
    levels = [torch.randint(config.codebook_size, (1, 12 * count), generator=generator) for count in (1, 2, 4)]
    return float(f"{float(snac.decode(levels).square().mean().sqrt()):.3g}")
