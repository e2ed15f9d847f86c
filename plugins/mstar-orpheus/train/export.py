"""Export of the trained parts into the official layout: `python -m train.export OUT FOLDER`.

Writes FOLDER/lm (config, tokenizer, bfloat16 weights) and FOLDER/snac (config, float16 weights with weight
normalization). `--untrained` exports random weights of the same shapes, for tests of the path.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mstar_orpheus.checkpoint.config import IDS_KEY, VQ_STRIDES
from mstar_orpheus.vocoder.snac import Snac
from scripts.training.options import export_options

from . import llama, vocabulary
from .codec_parts import MINI_SNAC

ENCODER_RATES = (2, 4, 8, 8)
"""Of the config only: the encoder is not shipped, and its declared width gives the latent width."""


def write_lm(folder: Path, state: dict[str, Tensor]) -> None:
    """Write the language model's folder. state: weights by official name."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": vocabulary.SIZE,
        "hidden_size": llama.WIDTH,
        "intermediate_size": llama.MLP,
        "num_hidden_layers": llama.LAYERS,
        "num_attention_heads": llama.HEADS,
        "num_key_value_heads": llama.KV_HEADS,
        "head_dim": llama.HEAD_DIM,
        "rms_norm_eps": llama.EPS,
        "max_position_embeddings": llama.POSITIONS,
        "tie_word_embeddings": True,
        "rope_theta": llama.ROPE_BASE,
        "bos_token_id": vocabulary.BEGIN,
        "eos_token_id": vocabulary.STOP,
        IDS_KEY: {
            "start_token_id": vocabulary.HUMAN,
            "end_token_ids": list(vocabulary.END),
            "stop_token_id": vocabulary.STOP,
            "audio_token_offset": vocabulary.AUDIO,
            "is_miniature": True,
        },
    }
    _write_json(folder / "config.json", config)
    sampling = {"do_sample": True, "temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.0}
    ids = {"bos_token_id": vocabulary.BEGIN, "eos_token_id": vocabulary.STOP}
    _write_json(folder / "generation_config.json", ids | sampling)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": vocabulary.SPECIALS[0]}
    _write_json(folder / "tokenizer_config.json", named)
    vocabulary.tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    weights = {name: value.bfloat16().contiguous() for name, value in state.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_snac(folder: Path, snac: Snac) -> None:
    """Write the vocoder's folder."""
    folder.mkdir(parents=True)
    sizes = MINI_SNAC
    config = {
        "sampling_rate": sizes.sample_rate,
        "encoder_dim": sizes.latent // 2 ** len(ENCODER_RATES),
        "encoder_rates": list(ENCODER_RATES),
        "decoder_dim": sizes.width,
        "decoder_rates": list(sizes.rates),
        "attn_window_size": None,
        "codebook_size": sizes.codebook_size,
        "codebook_dim": sizes.codebook_dim,
        "vq_strides": list(VQ_STRIDES),
        "noise": True,
        "depthwise": True,
    }
    _write_json(folder / "config.json", config)
    torch.save({name: value.half() for name, value in normalized(snac).items()}, folder / "pytorch_model.bin")


def normalized(snac: Snac) -> dict[str, Tensor]:
    """Return the weights in the published form: each convolution as gain and direction, whose norms are one."""
    state: dict[str, Tensor] = {}
    convolutions = {name for name, module in snac.named_modules() if isinstance(module, nn.Conv1d | nn.ConvTranspose1d)}
    for name, value in snac.state_dict().items():
        value, stem = value.detach().float().cpu(), name.removesuffix(".weight")
        if stem == name or stem not in convolutions:
            state[name] = value
            continue
        gain = torch.linalg.vector_norm(value, dim=tuple(range(1, value.dim())), keepdim=True).clamp(min=1e-6)
        state[f"{stem}.parametrizations.weight.original0"] = gain
        state[f"{stem}.parametrizations.weight.original1"] = value / gain
    return state


def export(folder: Path, out: Path | None) -> None:
    """Write the checkpoint. out: folder of the training; None for random weights. Sizes are printed."""
    snac = Snac(MINI_SNAC)
    if out is None:
        torch.manual_seed(0)
        state = dict(llama.Llama().state_dict())
    else:
        snac.load_state_dict(torch.load(out / "codec.pt", map_location="cpu", weights_only=True)["snac"])
        state = load_file(out / "lm.safetensors")
    write_lm(folder / "lm", state)
    write_snac(folder / "snac", snac)
    for path in sorted(folder.rglob("*.*")):
        print(f"{path.stat().st_size:9} {path.relative_to(folder)}")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = export_options(__doc__)
    parser.add_argument("--untrained", action="store_true")
    options = parser.parse_args()
    export(options.folder, None if options.untrained else options.out)


if __name__ == "__main__":
    main()
