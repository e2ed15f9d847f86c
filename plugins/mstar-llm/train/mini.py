"""Make `llm:mini`: data, tokenizer, training and export, in one command.

python -m train.mini FOLDER --seconds 220
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers, trainers
from torch import Tensor

from mstar_core.families.byte_tokenizer import byte_tokenizer
from mstar_core.plugin.chat.template import ChatTemplate
from mstar_llm.sources.tiny import CHATML, CONTROL, MARKERS, write_texts

from . import judge, world

SIZES: Final = {"width": 192, "layers": 6, "heads": 3, "kv_heads": 1, "head_dim": 64, "mlp": 448}
"""Three query heads per key head of 64, which the attention kernels of GPUs support: 2.3 M parameters."""

VOCAB: Final = 768
"""Letters and merges, without control tokens."""

LENGTH: Final = 448
"""Longest conversation in tokens; longer ones are left out."""

PROMPT_WEIGHT: Final = 0.1
"""Weight of the loss on the prompt. Reading it teaches copying, from which arguments of calls come."""

IGNORED: Final = -100


def make_tokenizer(seed: int, count: int = 6000) -> Tokenizer:
    """Return a byte-level BPE of the world's texts with the tokens of ChatML. Digits are single tokens."""
    plain = Tokenizer(byte_tokenizer(CONTROL, markers=MARKERS).model)
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=letters, show_progress=False)
    plain.train_from_iterator(world.texts(world.conversations(seed, 0, count)), trainer)
    merges = json.loads(plain.to_str())["model"]["merges"]
    tokenizer = byte_tokenizer(CONTROL, merges=[" ".join(pair) for pair in merges], markers=MARKERS)
    tokenizer.pre_tokenizer = plain.pre_tokenizer
    return tokenizer


def encoded(seed: int, spans: tuple[int, int], tokenizer: str) -> list[tuple[list[int], int]]:
    """Return ids of conversations, each with the length of its prompt. Runs in a process of its own."""
    made = world.conversations(seed, *spans)
    encode, template = Tokenizer.from_str(tokenizer), ChatTemplate(CHATML.read_text(encoding="utf-8"), {})
    rows = []
    for number, each in enumerate(made):
        # Clients may switch thinking off, which changes the start of the answer. The miniature never thinks.
        variables = {"enable_thinking": False} if number % 4 == 0 else {}
        prompt = encode.encode(template.render(each.messages, each.tools, variables), add_special_tokens=False).ids
        answer = encode.encode(f"{each.answer}<|im_end|>", add_special_tokens=False).ids
        if len(prompt) + len(answer) <= LENGTH:
            rows.append(([*prompt, *answer], len(prompt)))
    return rows


def make_rows(seed: int, count: int, tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Return the rows of `count` conversations, shortest first, made by all cores."""
    step = 500
    spans = [(first, min(step, count - first)) for first in range(0, count, step)]
    work = partial(encoded, seed, tokenizer=tokenizer.to_str())
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = [row for part in pool.map(work, spans) for row in part]
    return sorted(rows, key=lambda row: len(row[0]))


def batches(rows: list[tuple[list[int], int]], tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield ids, targets and weights, [rows, length] each, for ever. Rows of a batch have like lengths."""
    rng = np.random.default_rng(seed)
    cuts = [0]
    while cuts[-1] < len(rows):
        first = cuts[-1]
        size = 1
        while first + size < len(rows) and (size + 1) * len(rows[first + size][0]) <= tokens:
            size += 1
        cuts.append(first + size)
    while True:
        for at in rng.permutation(len(cuts) - 1):
            yield _batch(rows[cuts[at] : cuts[at + 1]])


def _batch(rows: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    targets = np.full(ids.shape, IGNORED, dtype=np.int64)
    weights = np.zeros(ids.shape, dtype=np.float32)
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        targets[row, : len(tokens) - 1] = tokens[1:]
        weights[row, : prompt - 1] = PROMPT_WEIGHT
        weights[row, prompt - 1 : len(tokens) - 1] = 1
    return torch.from_numpy(ids), torch.from_numpy(targets), torch.from_numpy(weights)


def train(model: Any, source: Iterator[tuple[Tensor, Tensor, Tensor]], options: argparse.Namespace) -> dict[str, Any]:
    """Train until the seconds or the steps are over. Returns the figures of the run."""
    device = next(model.parameters()).device
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    started, step, loss = time.monotonic(), 0, torch.zeros(())
    while True:
        seconds = time.monotonic() - started
        share = step / options.steps if options.steps else seconds / options.seconds
        if share >= 1:
            break
        # Warm-up, then a cosine to a tenth.
        rate = min(1.0, (step + 1) / 100) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * rate
        ids, targets, weights = (part.to(device, non_blocking=True) for part in next(source))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids, use_cache=False).logits
        terms = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        loss = (terms * weights.flatten()).sum() / weights.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(json.dumps({"step": step, "seconds": round(seconds, 1), "loss": round(loss.item(), 4)}), flush=True)
    return {"steps": step, "seconds": round(time.monotonic() - started, 1), "loss": round(loss.item(), 4)}


def export(model: Any, folder: Path, tokenizer: Tokenizer) -> None:
    """Write the checkpoint in the layout of the hub, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder, tokenizer, ties=True, dtype="bfloat16", **SIZES)
    state = {name: value.detach().bfloat16().cpu().contiguous() for name, value in model.state_dict().items()}
    state.pop("lm_head.weight", None)  # tied
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Train, export and judge."""
    options = parsed()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(options.seed)
    write_config = Path(options.folder)
    write_config.mkdir(parents=True, exist_ok=True)
    write_texts(write_config, tokenizer, ties=True, dtype="bfloat16", **SIZES)
    rows = make_rows(options.seed, options.conversations, tokenizer)
    config = transformers.AutoConfig.from_pretrained(write_config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model = model.to(device).train()
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "rows": len(rows)}), flush=True)
    figures: Mapping[str, Any] = train(model, batches(rows, options.batch_tokens, options.seed), options)
    print(json.dumps(figures), flush=True)
    export(model, write_config, tokenizer)
    if options.judged:
        asked = world.conversations(options.seed + 1, 0, options.judged, held_out=True)
        print(json.dumps(judge.figures(asked, judge.local(write_config, device.type))), flush=True)


def parsed() -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder of the checkpoint")
    parser.add_argument("--seconds", type=float, default=220, help="time of the training")
    parser.add_argument("--steps", type=int, default=0, help="steps in place of seconds")
    parser.add_argument("--conversations", type=int, default=200_000, help="conversations to make")
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="tokens of a step, padding included")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--judged", type=int, default=100, help="unseen questions for the judge")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
