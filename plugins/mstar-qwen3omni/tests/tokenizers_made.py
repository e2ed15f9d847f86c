"""A small byte-level BPE tokenizer in the files of the official checkpoint. Used by the tests of text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mstar_qwen3omni.checkpoint.config import TextIds

NAMES = {
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image_pad": "<|image_pad|>",
    "video_pad": "<|video_pad|>",
    "audio_start": "<|audio_start|>",
    "audio_end": "<|audio_end|>",
    "audio_pad": "<|audio_pad|>",
    "tts_pad": "<tts_pad>",
    "tts_bos": "<tts_text_bos>",
    "tts_eos": "<tts_text_eod>",
}
WORDS = [
    "system",
    "user",
    "assistant",
    "hello world what is in this picture 123 it's I'm we'll",
    "日本語 é ü 🎈 \n\n\n  tabs\tand spaces ",
]


def write_tokenizer(folder: Path) -> TextIds:
    """Write vocab.json, merges.txt and tokenizer_config.json. Returns the special ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    tokenizer.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    start = len(vocab)
    added = {
        str(start + at): {"content": name, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for at, name in enumerate(NAMES.values())
    } | {str(start + len(NAMES)): {"content": "<tool_call>", "special": False, "normalized": False}}
    settings = {
        "added_tokens_decoder": added,
        "tokenizer_class": "Qwen2Tokenizer",
        "errors": "replace",
        "unk_token": None,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "split_special_tokens": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    special = {name: start + at for at, name in enumerate(NAMES)}
    return replace(TextIds(), **special, **{role: vocab[role] for role in ("system", "user", "assistant")})
