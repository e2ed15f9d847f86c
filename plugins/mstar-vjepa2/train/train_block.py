"""Training of `vjepa2_ac:mini`: makes data, trains the plugin's own modules, and writes the official layout.

The encoder learns vectors that change smoothly with the block's place; then it is frozen, and the predictor learns the
next frame from frame, action and state. Usage: train_block.py FOLDER [--device cuda]. The log goes to train.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import l1_loss, layer_norm, mse_loss, scaled_dot_product_attention

from mstar_vjepa2 import block
from mstar_vjepa2.checkpoint.config import CONFIG, ActionConfig, read_action
from mstar_vjepa2.checkpoint.files import WHOLE
from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
from mstar_vjepa2.nodes.encoder import LATENT_EPS, Encoder, latents_of
from mstar_vjepa2.published import action_weights

ENCODER: Final = {
    "crop_size": block.SIDE,
    "patch_size": 8,
    "tubelet_size": 2,
    "frames_per_clip": 8,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "mlp_ratio": 4.0,
    "layer_norm_eps": 1e-6,
}
AC_CONFIG: Final = {
    "model_type": "vjepa2_ac",
    "encoder": ENCODER,
    "ac_predictor": {
        "embed_dim": 48,
        "predictor_embed_dim": 48,
        "depth": 3,
        "num_heads": 3,
        "mlp_ratio": 4.0,
        "action_embed_dim": block.POSE,
        "use_extrinsics": False,
        "max_latent_frames": 8,
    },
}
WAVES: Final = (0.25, 0.5)
"""Waves of the encoder's targets over the table. At most half a wave, so that energies fall towards the goal."""
FRAMES: Final = 4
GAIN: Final = 20.0
"""First scale of the weights of actions and states, which are hundredths of a metre."""


class TrainingCache:
    """A KVView of B sequences of whole frames, with gradients: each pass appends one frame and sees all of them."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        query, key, value = (each.unflatten(0, (self._batch, -1)) for each in (query, key, value))
        if layer in self._kept:
            key, value = (torch.cat(both, dim=1) for both in zip(self._kept[layer], (key, value), strict=True))
        self._kept[layer] = key, value
        wide = (each.transpose(1, 2) for each in (query, key, value))
        return scaled_dot_product_attention(*wide, scale=scale).transpose(1, 2).flatten(0, 1)


def write_config(folder: Path) -> ActionConfig:
    """Write config.json, and return it as the plugin reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(AC_CONFIG) + "\n", encoding="utf-8")
    return read_action(folder)


def pixels(places: np.ndarray, device: torch.device) -> Tensor:
    """Return frames as the encoder takes them: uint8 [N, 1, 3, SIDE, SIDE]."""
    return torch.from_numpy(block.render(places).transpose(0, 3, 1, 2).copy())[:, None].to(device)


class Targets:
    """Targets of the encoder: waves of the block's place, and the covered share of the patch, mixed and normed."""

    def __init__(self, config: ActionConfig, seed: int, device: torch.device) -> None:
        width, waves = config.encoder.vit.width, 4 * len(WAVES)
        chance = torch.Generator().manual_seed(seed)
        mixing = torch.linalg.qr(torch.randn(width, width, generator=chance))[0][: waves + 1]
        self._mixing, self._patch, self._device = mixing.to(device), config.encoder.patch, device

    def __call__(self, places: np.ndarray) -> Tensor:
        """Return vectors float32 [N, patches, width] of places [N, 2]."""
        angles = np.stack([places * math.pi * wave / block.REACH for wave in WAVES], axis=-1).reshape(len(places), -1)
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
        cover = block.covered(places, self._patch)[..., None]
        facts = np.concatenate([np.broadcast_to(waves[:, None], (*cover.shape[:2], waves.shape[1])), cover], axis=-1)
        made = torch.from_numpy(facts.astype(np.float32)).to(self._device) @ self._mixing
        return layer_norm(made, made.shape[-1:], eps=LATENT_EPS)


def encode(encoder: Encoder, frames: Tensor) -> Tensor:
    """Return latents as a deployment makes them: float32 [N, patches, width]."""
    return latents_of(encoder.hidden(frames), frames.new_ones(len(frames)))


def rolled(predictor: ActionPredictor, given: Tensor, actions: Tensor, states: Tensor, *, is_taught: bool) -> Tensor:
    """Return predictions of frames 1 to T, [B, T, S, width], from true frames if taught, else from its own.

    given: latents [B, T, S, width]; actions, states: [B, T, 7].
    """
    batch, steps = given.shape[:2]
    cache, made, frame = TrainingCache(batch), [], given[:, :1]
    for step in range(steps):
        count = batch * predictor.frame_tokens
        positions = torch.full((count,), step, device=given.device)
        found = predictor(
            kv=cache,
            positions=positions,
            normalize_reps=torch.ones_like(positions),
            frame=frame,
            state=states[:, step],
            actions=actions[:, step : step + 1],
        )
        made.append(found["next_frame"][:, 0])
        frame = given[:, step + 1 : step + 2] if is_taught else found["next_frame"]
    return torch.stack(made, dim=1)


def sequences(chance: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random ways of the block, [count, FRAMES + 1, 2], and its moves, [count, FRAMES, 2]."""
    places = [chance.uniform(-block.REACH, block.REACH, (count, 2))]
    moves = chance.uniform(-block.FASTEST, block.FASTEST, (count, FRAMES, 2))
    for step in range(FRAMES):
        places.append(block.moved(places[-1], moves[:, step]))
    return np.stack(places, axis=1), moves


def optimise(
    module: nn.Module, loss: Callable[[np.random.Generator], Tensor], options: argparse.Namespace, name: str, steps: int
) -> dict[str, Any]:
    """Minimise a loss by AdamW with a cosine schedule over steps or time, whichever ends first."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.01)
    chance, start, losses = np.random.default_rng((options.seed, len(name))), time.perf_counter(), []
    for step in range(steps):
        share = max(step / steps, (time.perf_counter() - start) / (30 * options.minutes))
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * share)) + 1e-5
        wrong = loss(chance)
        optimizer.zero_grad(set_to_none=True)
        wrong.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(wrong.item())
        if step % 100 == 99:
            took = time.perf_counter() - start
            print(f"{name}, step {step + 1}: loss {np.mean(losses[-100:]):.4f}, {took:.0f} s", flush=True)
    return {"steps": len(losses), "loss": float(np.mean(losses[-50:])), "s": round(time.perf_counter() - start, 1)}


def save(encoder: Encoder, predictor: ActionPredictor, config: ActionConfig, folder: Path) -> None:
    """Write the weights in bfloat16 under the official names."""
    published = action_weights(config)
    places = published.key_map().targets
    held = {f"video_encoder.{name}": value for name, value in encoder.state_dict().items()}
    held |= {f"ac_predictor.{name}": value for name, value in predictor.state_dict().items()}
    kept = {name: held[str(places[name])].detach().cpu().to(torch.bfloat16).contiguous() for name in published.tensors}
    save_file(kept, folder / WHOLE, metadata={"format": "pt"})


def use_plain_operations() -> None:
    """Make all modules of this process take their plain paths, because the CUDA kernels have no gradients.

    The modules choose by `is_cuda`. Products are computed in TF32.
    """
    torch.Tensor.is_cuda = property(lambda self: False)  # type: ignore[assignment,misc]
    torch.set_float32_matmul_precision("high")


def train(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train encoder, then predictor, and write the checkpoint. Returns the figures of the log."""
    if options.device == "cuda":
        use_plain_operations()
    torch.manual_seed(options.seed)
    device, config = torch.device(options.device), write_config(folder)
    encoder, predictor = Encoder(config.encoder).to(device), ActionPredictor(config).to(device)
    for layer in (predictor.action_encoder, predictor.state_encoder):
        nn.init.normal_(layer.weight, std=GAIN / math.sqrt(block.POSE))
    targets = Targets(config, options.seed, device)

    def seen(chance: np.random.Generator) -> Tensor:
        places = chance.uniform(-block.REACH, block.REACH, (options.batch, 2))
        return mse_loss(encode(encoder, pixels(places, device)), targets(places))

    def foreseen(chance: np.random.Generator) -> Tensor:
        places, moves = sequences(chance, options.batch // 2)
        with torch.no_grad():
            flat = encode(encoder, pixels(places.reshape(-1, 2), device))
        latents = flat.unflatten(0, places.shape[:2])
        actions, states = (torch.from_numpy(block.poses(each)).float().to(device) for each in (moves, places[:, :-1]))
        taught, own = (
            rolled(predictor, latents[:, :-1], actions, states, is_taught=is_taught) for is_taught in (True, False)
        )
        return l1_loss(taught, latents[:, 1:]) + l1_loss(own, latents[:, 1:])

    first = optimise(encoder, seen, options, "encoder", options.steps // 2)
    encoder.requires_grad_(False)
    second = optimise(predictor, foreseen, options, "predictor", options.steps)
    save(encoder, predictor, config, folder)
    count = sum(each.numel() for module in (encoder, predictor) for each in module.parameters())
    log = {
        "seed": options.seed,
        "device": options.device,
        "batch": options.batch,
        "parameters": count,
        "encoder": first,
        "predictor": second,
    }
    (folder / "train.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    print(json.dumps(train((options := parser.parse_args()).folder, options)))


if __name__ == "__main__":
    main()
