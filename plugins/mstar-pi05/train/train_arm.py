"""Training of `pi05:mini`: makes data, trains the plugin's own modules, and writes a checkpoint in openpi's layout.

Usage: train_arm.py FOLDER [--device cuda] [--minutes 5]. The log goes to FOLDER/train.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mstar_pi05 import arm
from mstar_pi05.checkpoint.config import ACTION_WIDTH, CAMERAS, CONFIG, IMAGE, read_sizes
from mstar_pi05.nodes.policy import Policy
from mstar_pi05.nodes.siglip import Cameras as CameraTower
from mstar_pi05.published import names, policy_target
from mstar_pi05.request.conversion import normalise
from mstar_pi05.request.prompt import PromptTokenizer, pieces
from mstar_pi05.robots.statistics import FILE, find_statistics

SPACE: Final = "▁"
SPECIALS: Final = ("<pad>", "<eos>", "<bos>", "<unk>")
WORDS: Final = ("Task", "State", "Action", "▁State", "▁reach", "▁the", "▁target", *(f"▁{name}" for name in arm.NAMES))
CONFIG_VALUES: Final = {
    "max_token_len": 48,
    "action_dim": 32,
    "action_horizon": arm.HORIZON,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "time_min_period": 0.004,
    "time_max_period": 4.0,
    "vision": {"width": 64, "layers": 2, "heads": 2, "mlp": 128, "image_size": arm.SIDE, "patch_size": 8},
    "language": {"width": 64, "layers": 3, "mlp": 128, "heads": 2, "kv_heads": 1, "head_dim": 64},
    "expert": {"width": 64, "layers": 3, "mlp": 128, "heads": 2, "kv_heads": 1, "head_dim": 64},
}
DRAWS: Final = 2
"""Flow times per observation: the prefix is computed once for all of them."""
CHUNK: Final = 512
SIGHT: Final = 1200
"""Steps that train the cameras alone."""
SEES_ALL: Final = (0, 2)
"""Cameras that see every target."""


class TrainingCache:
    """A KVView of B prefixes of one length, with gradients. draws: suffixes per prefix that read it."""

    def __init__(self, batch: int) -> None:
        self.batch, self.draws = batch, 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView. Passes with draws read the prefix; the one without writes it. The mask is full."""
        heads = query.shape[1]
        query, key, value = (each.unflatten(0, (self.batch * max(1, self.draws), -1)) for each in (query, key, value))
        if self.draws:
            prefix = (each.repeat_interleave(self.draws, dim=0) for each in self._kept[layer])
            key, value = (torch.cat(both, dim=1) for both in zip(prefix, (key, value), strict=True))
        else:
            self._kept[layer] = key, value
        wide = (each.repeat_interleave(heads // each.shape[2], dim=2).transpose(1, 2) for each in (query, key, value))
        return scaled_dot_product_attention(*wide, scale=scale).transpose(1, 2).flatten(0, 1)


def write_files(folder: Path) -> None:
    """Write config, tokenizer and statistics: all of the checkpoint but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    _write_json(folder / CONFIG, {"vocab_size": vocab, **CONFIG_VALUES})
    asset = folder / "assets" / "arm"
    asset.mkdir(parents=True, exist_ok=True)
    ranges = {"state": (arm.LOW, arm.HIGH), "actions": (np.full(2, -arm.FASTEST), np.full(2, arm.FASTEST))}
    statistics = {
        name: {
            "mean": ((low + high) / 2).tolist(),
            "std": ((high - low) / 4).tolist(),
            "q01": low.tolist(),
            "q99": high.tolist(),
        }
        for name, (low, high) in ranges.items()
    }
    _write_json(asset / FILE, {"norm_stats": statistics})


def make_tokenizer() -> Tokenizer:
    """Return a BPE tokenizer with byte fallback in which each word of the world and each bin number is one token."""
    merges, known = [], dict.fromkeys([*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "\n"])
    texts = [*WORDS, *(f"{SPACE}{number}" for number in range(256))]
    known.update(dict.fromkeys("".join([SPACE, ",.:;-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"])))
    for text in texts:
        for end in range(2, len(text) + 1):
            if text[:end] not in known:
                known[text[:end]] = None
                merges.append((text[: end - 1], text[end - 1]))
    vocab = {piece: number for number, piece in enumerate(known)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in SPECIALS])
    tokenizer.add_tokens([AddedToken("\n", normalized=False, special=False)])
    return tokenizer


def made(folder: Path, seed: int, chunk: int) -> tuple[Any, ...]:
    """Return images, prompts, normalised actions and joint values at all targets and the named one, for a chunk.

    The plugin's own conversions make them.
    """
    scenes, tokenizer, statistics = (
        arm.draw((seed, chunk), CHUNK),
        PromptTokenizer(folder),
        find_statistics(folder, None),
    )
    assert statistics is not None and statistics.state is not None and statistics.actions is not None
    near = (
        np.random.default_rng((seed, chunk, 1)).random(CHUNK) < 0.4
    )  # the end of an episode, where corrections are small
    offset = np.random.default_rng((seed, chunk, 2)).normal(0, 0.15, (CHUNK, 2))
    scenes = scenes.moved(np.where(near[:, None], arm.solution(scenes.goal()) + offset, scenes.joints))
    states = normalise(scenes.joints, statistics.state)
    prompts = [
        tokenizer.encode(pieces(arm.instruction(named), state))
        for named, state in zip(scenes.named, states, strict=True)
    ]
    actions = normalise(arm.expert(scenes), statistics.actions)
    every = normalise(arm.solution(scenes.targets), statistics.state).reshape(CHUNK, -1)
    aims = [every, normalise(arm.solution(scenes.goal()), statistics.state)]
    return arm.render(scenes), np.array(prompts), actions.astype(np.float32), *(aim.astype(np.float32) for aim in aims)


class Miniature(nn.Module):
    """Both nodes, as a deployment has them, and the loss over them.

    seen, meant: probes that are not exported. They read where the targets are from camera vectors, and where the named
    one is from the prompt's hidden states, because the flow alone is slow to connect words and pictures.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        sizes = read_sizes(folder)
        self.sizes, self.cameras, self.policy = sizes, CameraTower(sizes), Policy(sizes)
        self.seen = nn.Linear(sizes.language.width, 2 * len(arm.NAMES))
        self.meant = nn.Linear(sizes.language.width, 2)
        self._begin(PromptTokenizer(folder))

    def _begin(self, tokenizer: PromptTokenizer) -> None:
        """Set the first weights: norms without effect of the time, open gates, and neighbouring numbers alike."""
        for norm in self.policy.expert.norms:
            assert norm.dense is not None
            nn.init.zeros_(norm.dense.weight)
            nn.init.zeros_(norm.dense.bias)
            norm.dense.bias.data.view(3, -1)[2] = 1.0
        patches = self.cameras.tower.embeddings  # what is seen must not drown in where it is seen
        nn.init.normal_(patches.position_embedding.weight, std=0.3)
        patches.patch_embedding.weight.data.mul_(4)
        table = self.policy.language.embed_tokens.weight.data
        nn.init.normal_(table, std=table.shape[1] ** -0.5)
        waves = torch.arange(1, table.shape[1] // 2 + 1) * math.pi / 4
        for number in range(256):
            (place,) = tokenizer.encode([(f" {number}", False)])
            angle = waves * (number / 255)
            table[place] = torch.cat([angle.sin(), angle.cos()]) * table.shape[1] ** -0.5

    def sight(self, images: Tensor, every: Tensor) -> Tensor:
        """Return the loss of the probe of camera vectors, over the cameras that see every target."""
        vectors = self.cameras.encode(images[:, SEES_ALL])
        return (self.seen(vectors) - every[:, None]).square().mean()

    def loss(self, batch: tuple[Tensor, ...], chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return the flow-matching loss and those of both probes.

        batch: images uint8 [B, 3, S, S, 3], prompts [B, n], actions [B, horizon, 2], joint values at all targets [B, 6]
        and at the named one [B, 2].
        """
        images, prompts, actions, every, named = batch
        scenes, horizon, used = actions.shape
        cache = TrainingCache(scenes)
        features = self.cameras.encode(images)
        count = features.shape[1]
        length = count + prompts.shape[1]
        tokens = torch.cat([prompts.new_full((scenes, count), IMAGE), prompts], dim=1).flatten()
        blank = features.new_zeros(scenes, prompts.shape[1], features.shape[2])
        embeds = torch.cat([features, blank], dim=1).flatten(0, 1)
        places = torch.arange(length, device=tokens.device).repeat(scenes)
        language = self.policy.language
        hidden = language.hidden(language.embed(tokens, embeds), cache, self.policy.rotary(places))
        meant = self.meant(hidden.unflatten(0, (scenes, length))[:, count:])
        seen = self.seen(features.unflatten(1, (images.shape[1], -1))[:, SEES_ALL])
        cache.draws, rows = DRAWS, scenes * DRAWS
        device = actions.device
        times = torch.rand(rows, generator=chance, device=device) ** 0.75 * 0.999 + 0.001
        noise = torch.randn(rows, horizon, ACTION_WIDTH, generator=chance, device=device)
        wanted = nn.functional.pad(actions, (0, ACTION_WIDTH - used)).repeat_interleave(DRAWS, dim=0)
        mixed = times[:, None, None] * noise + (1 - times[:, None, None]) * wanted
        self.policy.tabulate(times, torch.zeros(1, 1, dtype=torch.int64, device=device))
        which = torch.arange(rows, device=device).repeat_interleave(horizon)
        suffix = length + torch.arange(horizon, device=device).repeat(rows)
        velocity = self.policy.velocity(cache, suffix, mixed.flatten(0, 1), which).view_as(mixed)
        wrong = (velocity - (noise - wanted)).square()
        flow = wrong[..., :used].mean() + 0.1 * wrong[..., used:].mean()
        return flow, (seen - every[:, None, None]).square().mean(), (meant - named[:, None]).square().mean()


def save(model: Miniature, folder: Path) -> None:
    """Write the weights in bfloat16 under the published names."""
    model.policy.table = None
    found = {
        **{f"vit_encoder.{name}": value for name, value in model.cameras.state_dict().items()},
        **{f"LLM.{name}": value for name, value in model.policy.state_dict().items()},
    }
    places = {name: policy_target(name) for name in names(model.sizes)}
    kept = {
        name: found[place].detach().cpu().to(torch.bfloat16).contiguous() for name, place in places.items() if place
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def batches(parts: tuple[Tensor, ...], size: int, chance: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """Yield shuffled batches without end."""
    while True:
        for chosen in torch.randperm(len(parts[0]), generator=chance).split(size)[:-1]:
            yield tuple(part[chosen.to(part.device)] for part in parts)


def use_plain_operations() -> None:
    """Make all modules of this process take their plain paths, because the CUDA kernels have no gradients.

    The modules choose by `is_cuda`. Products are computed in TF32.
    """
    torch.Tensor.is_cuda = property(lambda self: False)  # type: ignore[assignment,misc]
    torch.set_float32_matmul_precision("high")


def train_sight(model: Miniature, stream: Iterator[tuple[Tensor, ...]], steps: int, rate: float) -> float:
    """Train the cameras to see targets, before words and actions. Returns the mean loss of the last steps.

    Together from the start, the noise of the flow hides this loss: 400 steps taught nothing, alone they suffice.
    """
    learning = [*model.cameras.parameters(), *model.seen.parameters()]
    optimizer, losses = torch.optim.AdamW(learning, lr=rate, betas=(0.9, 0.95), weight_decay=0.01), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50)
        images, _, _, every, _ = next(stream)
        wrong = model.sight(images, every)
        optimizer.zero_grad(set_to_none=True)
        wrong.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        losses.append(wrong.item())
        if step % 100 == 99:
            print(f"cameras, step {step + 1}: loss {np.mean(losses[-100:]):.4f}", flush=True)
    return float(np.mean(losses[-100:]))


def train(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train and write a checkpoint. Returns the figures of the log."""
    began, device = time.perf_counter(), torch.device(options.device)
    if device.type == "cuda":
        use_plain_operations()
    torch.manual_seed(options.seed)
    write_files(folder)
    with ProcessPoolExecutor(options.workers) as pool:
        chunks = list(pool.map(partial(made, folder, options.seed), range(options.samples // CHUNK)))
    parts = tuple(torch.from_numpy(np.concatenate(part)).to(device) for part in zip(*chunks, strict=True))
    data_s = time.perf_counter() - began
    print(f"{len(parts[0])} samples in {data_s:.1f} s", flush=True)
    model = Miniature(folder).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.01)
    chance, feed = torch.Generator(device).manual_seed(options.seed), torch.Generator().manual_seed(options.seed)
    limit_s, start, losses = 60 * options.minutes, time.perf_counter(), []
    stream = batches(parts, options.batch, feed)
    sight = train_sight(model, stream, min(SIGHT, options.steps), options.rate)
    start = time.perf_counter()
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    for step in range(options.steps):
        share = max(step / options.steps, (time.perf_counter() - start) / limit_s)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * share)) + 1e-5
        shares = model.loss(next(stream), chance)
        loss = torch.stack(shares).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, value in model.named_parameters():
                average[name].lerp_(value, 0.01)
        losses.append([each.item() for each in shares])
        if step % 100 == 99:
            print(
                f"step {step + 1}: flow, seen, meant {np.mean(losses[-100:], axis=0).round(4)}, "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
            if step % 1000 == 999:
                save(model, folder)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(average[name])
    save(model, folder)
    log = {
        "seed": options.seed,
        "device": options.device,
        "samples": len(parts[0]),
        "steps": len(losses),
        "batch": options.batch,
        "parameters": sum(each.numel() for each in model.parameters()),
        "sight": round(sight, 4),
        "data_s": round(data_s, 1),
        "train_s": round(time.perf_counter() - start, 1),
        "loss": np.mean(losses[-100:], axis=0).round(4).tolist(),
        "cameras": len(CAMERAS),
    }
    _write_json(folder / "train.json", log)
    return log


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--samples", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=1)
    print(json.dumps(train((options := parser.parse_args()).folder, options)))


if __name__ == "__main__":
    main()
