"""Orpheus through the whole server on one GPU: HTTP `/generate`, streamed, random bf16 weights in the official shapes.

Run from the repository root: `python bench/gpu_server.py [--streams 1,8,32,64] [--out FILE]`. Writes a checkpoint whose
head gives audio ids only (574 ids are 6.83 s of sound then), starts a deployment, and sends closed loops of requests.
Prints JSON: time to ready by phases, and per number of streams first audio, real-time factor, audio seconds and ids per
second.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from mstar_orpheus.plugin import OFFICIAL
from mstar_orpheus.snac import SnacConfig
from mstar_orpheus.tiny import write_tiny
from mstar_orpheus.tiny_snac import _state

ROOT = Path(__file__).resolve().parents[1]
IDS = 574
WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM = 3072, 8192, 24, 8, 128
TEXT = "The quick brown fox jumps over the lazy dog while the sun goes down behind the hills."


def write_checkpoint(folder: Path) -> None:
    """Both parts in the official layout and shapes; the tokenizer is the tiny checkpoint's."""
    tiny = write_tiny(folder.parent / "tiny")
    for part in ("lm", "snac"):
        (folder / part).mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny / "lm" / name, folder / "lm" / name)
    config = json.loads((tiny / "lm" / "config.json").read_text())
    config |= {
        "vocab_size": OFFICIAL.vocab_size, "hidden_size": WIDTH, "intermediate_size": MLP, "num_attention_heads": HEADS,
        "num_hidden_layers": OFFICIAL.layers, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
    }  # fmt: skip
    config.pop("orpheus")
    (folder / "lm" / "config.json").write_text(json.dumps(config))
    save_file(language_weights(), folder / "lm" / "model.safetensors", metadata={"format": "pt"})
    codec = json.loads((tiny / "snac" / "config.json").read_text())
    codec |= {"encoder_dim": 48, "decoder_dim": 1024, "codebook_size": OFFICIAL.codebook_size}
    (folder / "snac" / "config.json").write_text(json.dumps(codec))
    torch.save(_state(SnacConfig.read(folder / "snac" / "config.json")), folder / "snac" / "pytorch_model.bin")


def language_weights() -> dict[str, torch.Tensor]:
    """Normal weights of 0.02. One hidden dimension is constant, so that the head can rule ids out."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return made.normal_(0.0, 0.02, generator=generator)

    embed, head = normal(OFFICIAL.vocab_size, WIDTH), normal(OFFICIAL.vocab_size, WIDTH)
    embed[:, 0] = 1.0
    head[:, 0] = -40.0
    head[OFFICIAL.audio_ids.start : OFFICIAL.audio_ids.stop, 0] = 0.0
    weights = {"model.embed_tokens.weight": embed.cpu(), "lm_head.weight": head.cpu()}
    weights["model.norm.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH), "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
        "mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP),
    }  # fmt: skip
    for layer in range(OFFICIAL.layers):
        for name, shape in shapes.items():
            value = normal(*shape)
            if name in ("self_attn.o_proj", "mlp.down_proj"):
                value[0] = 0.0
            weights[f"model.layers.{layer}.{name}.weight"] = value.cpu()
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    return weights


async def speak(client: httpx.AsyncClient, seed: int) -> dict[str, float]:
    """One request: first audio and total in seconds, audio seconds, longest gap between chunks."""
    body = {
        "text": TEXT, "output_modalities": "audio", "model_kwargs": {
            "max_output_tokens": IDS, "ignore_eos": True, "seed": seed, "voice": "tara"},
    }  # fmt: skip
    start = time.perf_counter()
    marks, samples = [], 0
    async with client.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200, (answer.status_code, await answer.aread())
        async for line in answer.aiter_lines():
            if not line.strip():
                continue
            item = json.loads(line)
            assert item["modality"] == "audio", line[:400]
            marks.append(time.perf_counter())
            samples += len(base64.b64decode(item["data"])) // 2
    end = time.perf_counter()
    gaps = [b - a for a, b in itertools.pairwise(marks)]
    return {"first": marks[0] - start, "total": end - start, "audio": samples / 24000, "gap": max(gaps, default=0.0)}


async def closed_loop(port: int, streams: int, rounds: int) -> dict[str, Any]:
    """`streams` clients that each send `rounds` requests, one after the other."""
    limits = httpx.Limits(max_connections=streams + 4)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=120) as client:

        async def one(number: int) -> list[dict[str, float]]:
            return [await speak(client, number * 100 + turn) for turn in range(rounds)]

        start = time.perf_counter()
        found = [item for group in await asyncio.gather(*(one(n) for n in range(streams))) for item in group]
        wall = time.perf_counter() - start
    ordered = {key: sorted(item[key] for item in found) for key in found[0]}
    middle = len(found) // 2
    factors = sorted(item["total"] / item["audio"] for item in found)
    return {
        "streams": streams, "n": len(found), "wall_s": round(wall, 3),
        "ids_per_s": round(IDS * len(found) / wall, 1),
        "audio_s_per_s": round(sum(ordered["audio"]) / wall, 2),
        "audio_s_each": round(ordered["audio"][middle], 3),
        "rtf": {"p50": round(factors[middle], 4), "min": round(factors[0], 4), "max": round(factors[-1], 4)},
        "first_audio_ms": {
            name: round(1e3 * ordered["first"][at], 1) for name, at in (("p50", middle), ("min", 0), ("max", -1))
        },
        "longest_gap_ms": round(1e3 * ordered["gap"][-1], 1),
    }  # fmt: skip


def main() -> int:
    """Write, start, measure, stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18123)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written, or is already")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="mstar-", dir="/tmp"))
    folder = options.folder or scratch / "orpheus"
    report: dict[str, Any] = {"what": "Orpheus 3B shapes through /generate", "gpu": torch.cuda.get_device_name()}
    start = time.perf_counter()
    if not folder.exists():
        write_checkpoint(folder)
    torch.cuda.empty_cache()
    report["write_checkpoint_s"] = round(time.perf_counter() - start, 1)
    print(json.dumps(report), flush=True)
    environment = {**os.environ, "MSTAR_RUNTIME_DIR": str(scratch / "run")}
    most = max(int(each) for each in options.streams.split(","))
    start = time.perf_counter()
    up = [
        sys.executable, "-m", "mstarctl", "up", "orpheus", "--weights", str(folder), "--name", "bench", "--device",
        "cuda", "--host", "127.0.0.1", "--port", str(options.port), "--set", f"max_concurrent_requests={most}",
        "--set", "max_seq_len=2048", "--set", "kv_cache.tokens=200000", "-d",
    ]  # fmt: skip
    code = subprocess.run(up, env=environment, cwd=ROOT, check=False).returncode
    report["ready_s"] = round(time.perf_counter() - start, 2)
    try:
        if code == 0:
            report["first_request"] = asyncio.run(closed_loop(options.port, 1, 1))
            asyncio.run(closed_loop(options.port, most, 1))
            report["loops"] = []
            for streams in map(int, options.streams.split(",")):
                report["loops"].append(asyncio.run(closed_loop(options.port, streams, options.rounds)))
                print(json.dumps(report["loops"][-1]), flush=True)
    finally:
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
        for path in sorted((scratch / "run").rglob("*.log")) + sorted((scratch / "run").rglob("*.jsonl")):
            print(f"--- {path.name}", path.read_text(errors="replace")[-2500:], flush=True)
        down = [sys.executable, "-m", "mstarctl", "down", "--all", "--now"]
        subprocess.run(down, env=environment, cwd=ROOT, check=False, timeout=60)
    print(json.dumps(report, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
