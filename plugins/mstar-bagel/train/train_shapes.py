"""Training of `bagel:mini`: autoencoder first, then text and flow together, on the plugin's own modules.

Usage: train_shapes.py FOLDER [--device cuda]. Writes the official layout; figures go to train.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from judge_shapes import SPLIT_SEED
from safetensors.torch import save_file
from tokenizers import AddedToken, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

from mstar_bagel import shapes
from mstar_bagel.checkpoint.config import (
    CONFIG,
    CONTROL,
    LLM_CONFIG,
    MODEL_FILE,
    TOKENIZER_CONFIG,
    VAE_FILE,
    VIT_CONFIG,
    Sizes,
    read_sizes,
)
from mstar_bagel.graph import MARKERS
from mstar_bagel.nodes.autoencoder import VaeDecoder, VaeEncoder
from mstar_bagel.nodes.language import BagelLLM, Packing
from mstar_bagel.nodes.vision import ImageFeatures
from mstar_bagel.request.prompt import PromptIds
from mstar_bagel.request.tokenizer import FILE, TextTokenizer, qwen_tokenizer

GRID: Final = 8
LANGUAGE: Final = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 160,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
    "model_type": "qwen2",
    "hidden_act": "silu",
}
VISION: Final = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "patch_size": 8,
    "num_channels": 3,
    "image_size": shapes.SIDE,
    "layer_norm_eps": 1e-6,
    "model_type": "siglip_vision_model",
}
VAE: Final = {
    "ch": 32,
    "ch_mult": [1, 1],
    "num_res_blocks": 1,
    "z_channels": 4,
    "scale_factor": 1.0,
    "shift_factor": 0.0,
}
RULES: Final = {
    "vae": {"max_size": shapes.SIDE, "min_size": shapes.SIDE, "stride": 16},
    "vit": {"max_size": shapes.SIDE, "min_size": shapes.SIDE, "stride": 8},
}
PATCH: Final = 4
DROPPED: Final = 0.15
"""Share of prompts, and of an edit's pictures, that training removes for guidance."""
SHIFT: Final = 3.0
EMA: Final = 0.999
EVERY: Final = {"edit": 2, "describe": 8}
"""Steps between those that include a loss: descriptions are learned long before pictures."""

Names = tuple[str, ...]
Replayed = tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]
"""A graph of one step, and its losses."""


class MaskedCache:
    """A KVView of B sequences of equal padded length, with gradients. Later segments see only valid keys."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: Tensor | None = None
        self._mask: Tensor | None = None

    def begin(self, valid: Tensor, *, is_causal: bool = False) -> None:
        """Begin a segment. valid: bool [B, q], false for padding and for dropped segments."""
        count = valid.shape[1]
        within = torch.ones(count, count, dtype=torch.bool, device=valid.device)
        own = (within.tril() if is_causal else within)[None] & valid[:, None]
        # A padded query sees itself: a row without keys would be NaN.
        own = own | torch.eye(count, dtype=torch.bool, device=valid.device)
        if self._seen is not None:
            own = torch.cat([self._seen[:, None].expand(-1, count, -1), own], dim=-1)
            valid = torch.cat([self._seen, valid], dim=1)
        self._mask, self._seen = own[:, None], valid

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        query, key, value = (each.unflatten(0, (self._batch, -1)) for each in (query, key, value))
        if layer in self._kept:
            key, value = (torch.cat(both, dim=1) for both in zip(self._kept[layer], (key, value), strict=True))
        self._kept[layer] = key, value
        wide = (each.transpose(1, 2) for each in (query, key, value))
        found = scaled_dot_product_attention(*wide, attn_mask=self._mask, scale=scale)
        return found.transpose(1, 2).flatten(0, 1)


class EvenPacking(Packing):
    """Packing of images of one size, without a tensor per image."""

    __slots__ = ()

    def join(self, gen: Tensor, und: Tensor) -> Tensor:
        """See Packing."""
        count = len(self.lengths)
        return torch.cat([gen.unflatten(0, (count, -1)), und.unflatten(0, (count, -1))], dim=1).flatten(0, 1)

    def split(self, x: Tensor) -> list[Tensor]:
        """See Packing."""
        parts = x.unflatten(0, (len(self.lengths), -1)).split([self.lengths[0], MARKERS], dim=1)
        return [part.flatten(0, 1) for part in parts]


@dataclass(frozen=True, slots=True)
class Texts:
    """Padded text segments by row: ids int64 [N, L] and lengths [N]."""

    ids: Tensor
    lengths: Tensor

    def rows(self, chosen: Tensor) -> Texts:
        return Texts(self.ids[chosen], self.lengths[chosen])

    @property
    def valid(self) -> Tensor:
        return torch.arange(self.ids.shape[1], device=self.ids.device)[None] < self.lengths[:, None]


class Miniature(nn.Module):
    """The trained modules without the autoencoder, and passes over batches of equal segments."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.llm, self.eyes = sizes, BagelLLM(sizes), ImageFeatures(sizes)
        for module in self.modules():
            if isinstance(module, nn.Embedding) or type(module).__name__ == "TokenEmbedding":
                nn.init.normal_(module.weight, std=0.5)  # type: ignore[arg-type]
        for module in (self.llm, self.eyes):
            for name, value in module.named_parameters():
                if name.endswith("pos_embed"):
                    nn.init.normal_(value, std=0.5)
        nn.init.zeros_(self.llm.llm2vae.weight)
        nn.init.zeros_(self.llm.llm2vae.bias)

    def features(self, pictures: Tensor) -> Tensor:
        """Return features [B, n, width], as `ImageFeatures` does for each. pictures: uint8 [B, 3, y, x]."""
        model, side = self.eyes.vit_model.vision_model, self.sizes.vision.patch
        values = self.eyes.pixels(pictures)
        # [B, channels, h, side, w, side]: as `vision.patches` lays out one picture.
        grid = values.unflatten(3, (-1, side)).unflatten(2, (-1, side))
        x = model.embeddings.patch_embedding(grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
        x = x + model.embeddings.position_embedding.weight
        for block in model.blocks:
            own = block.self_attn
            normed = block.layer_norm1(x)
            split = (
                layer(normed).unflatten(-1, (own.heads, -1)).transpose(1, 2)
                for layer in (own.q_proj, own.k_proj, own.v_proj)
            )
            x = x + own.out_proj(scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.layer_norm2(x))
        found: Tensor = self.eyes.connector(model.post_layernorm(x)) + self.eyes.vit_pos_embed.pos_embed
        return found

    def read(self, kv: MaskedCache, texts: Texts, start: Tensor, kept: Tensor) -> Tensor:
        """Append text segments, and return their states [B, L, width]. start: first positions; kept: bool [B]."""
        kv.begin(texts.valid & kept[:, None], is_causal=True)
        positions = start[:, None] + torch.arange(texts.ids.shape[1], device=start.device)
        x = self.llm.language_model.model.embed_tokens(texts.ids.flatten())
        return self.llm.language_model.model.text(x, positions.flatten(), kv).unflatten(0, texts.ids.shape)

    def see(self, kv: MaskedCache, pictures: Tensor, position: int, kept: Tensor) -> None:
        """Append segments of image features."""
        found = self.features(pictures)
        count, length = len(found), found.shape[1] + MARKERS
        kv.begin(kept[:, None].expand(-1, length))
        markers = self.llm._markers(count).unflatten(0, (count, MARKERS))
        x = torch.cat([found, markers], dim=1).flatten(0, 1)
        self.llm.language_model.model.text(x, torch.full((len(x),), position, device=x.device), kv)

    def flow(self, kv: MaskedCache, latents: Tensor, times: Tensor, position: Tensor, kept: Tensor) -> Tensor:
        """Append latent tokens [B, n, channels], and return velocities of their shape. times, position: [B]."""
        count, length = latents.shape[:2]
        kv.begin(kept[:, None].expand(-1, length + MARKERS))
        llm = self.llm
        x = llm.vae2llm(latents) + llm.time_embedder(times)[:, None] + llm.latent_pos_embed.pos_embed
        places = position[:, None].expand(-1, length + MARKERS).flatten()
        packing = EvenPacking((length,) * count)
        states = llm.language_model.model.images(x.flatten(0, 1), llm._markers(count), places, kv, packing)
        found: Tensor = llm.llm2vae(states).unflatten(0, (count, length))
        return found


class Data:
    """Pictures, latents and sentences of the training split, on the device."""

    def __init__(self, sizes: Sizes, folder: Path, options: argparse.Namespace) -> None:
        scenes, _, edits, _ = shapes.split(SPLIT_SEED)
        prompt = PromptIds(TextTokenizer(folder), sizes.ids)
        device, chance = torch.device(options.device), random.Random(options.seed)
        both = [each for scene in scenes for each in (scene, scene.mirrored)]
        self.prompts = _padded([prompt.text(each.sentence) for each in both], device)
        self.question = _padded([prompt.text(shapes.QUESTION)], device)
        self.wishes = _padded([prompt.text(each.sentence) for each in edits], device)
        # Every third picture shows one shape: they are few among the scenes.
        single = len(shapes.things())
        self.scene = [
            chance.randrange(single) if number % 3 == 0 else chance.randrange(single, len(scenes))
            for number in range(options.pictures)
        ]
        self.edit = [chance.randrange(len(edits)) for _ in range(options.pictures // 4)]
        drawn = [shapes.draw(scenes[each], chance) for each in self.scene]
        before, after = [], []
        for number in self.edit:
            own = shapes.Scene(edits[number].before)
            where = shapes.places(own, chance)
            before.append(shapes.render(own.things, where))
            after.append(shapes.render((edits[number].after,), where))
        self.pictures, self.before, self.after = (_planes(each, device) for each in (drawn, before, after))
        self.scenes, self.edits = (torch.tensor(each, device=device) for each in (self.scene, self.edit))


def _padded(texts: list[list[int]], device: torch.device) -> Texts:
    width = max(map(len, texts))
    ids = torch.tensor([each + [0] * (width - len(each)) for each in texts], device=device)
    return Texts(ids, torch.tensor([len(each) for each in texts], device=device))


def _planes(pictures: list[shapes.Pixels], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous().to(device)


def write_configs(folder: Path, scale: float = 1.0, shift: float = 0.0) -> Sizes:
    """Write tokenizer and configs, and return the sizes as the plugin reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*shapes.COLORS, *shapes.SHAPES, "left", "right", "of", "above", "below", "a", "make", "it", "what"]
    tokens, merges = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet())), dict[tuple[str, str], None]()
    for word in [*(f"Ġ{each}" for each in words), "make", "what"]:
        for end in range(2, len(word) + 1):
            merges[word[: end - 1], word[end - 1]] = None
            tokens[word[:end]] = None
    made = qwen_tokenizer(models.BPE(vocab={each: number for number, each in enumerate(tokens)}, merges=list(merges)))
    names = ("<|endoftext|>", *CONTROL.values())
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    made.save(str(folder / FILE))
    added = {
        str(number): {"content": token.content, "special": True}
        for number, token in made.get_added_tokens_decoder().items()
    }
    vae = VAE | {"scale_factor": scale, "shift_factor": shift}
    contents = {
        TOKENIZER_CONFIG: {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added},
        LLM_CONFIG: LANGUAGE | {"vocab_size": made.get_vocab_size(with_added_tokens=True)},
        VIT_CONFIG: VISION,
        CONFIG: {
            "model_type": "bagel",
            "vae_config": vae,
            "latent_patch_size": PATCH,
            "preprocess": RULES,
            "vit_max_num_patch_per_side": GRID,
        },
    }
    for name, value in contents.items():
        (folder / name).write_text(json.dumps(value) + "\n", encoding="utf-8")
    sizes = read_sizes(folder)
    return replace(sizes, latent_grid=GRID, vision=replace(sizes.vision, grid=GRID))


class Steps:
    """Optimisation steps over chosen losses. On CUDA they are graphs: launches would take most of a step's time."""

    def __init__(self, module: nn.Module, losses: Mapping[str, Callable[[], Tensor]], device: torch.device) -> None:
        self._kept = list(module.parameters())
        self._losses, self._graphs, self._on_device = losses, dict[Names, Replayed](), device.type == "cuda"
        for each in self._kept:
            each.grad = torch.zeros_like(each)
        rate = torch.zeros((), device=device) if self._on_device else 0.0
        self._optimizer = torch.optim.AdamW(
            self._kept, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, capturable=self._on_device
        )

    def run(self, names: Names, rate: float) -> dict[str, Tensor]:
        """Run one step over the sum of the named losses, and return them. On CUDA the next step overwrites them."""
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if not self._on_device:
            return self._step(names)
        if names not in self._graphs:
            self._graphs[names] = self._captured(names)
        graph, parts = self._graphs[names]
        graph.replay()
        return parts

    def _step(self, names: Names) -> dict[str, Tensor]:
        torch._foreach_zero_([each.grad for each in self._kept])
        parts = {name: self._losses[name]() for name in names}
        torch.stack(list(parts.values())).sum().backward()
        nn.utils.clip_grad_norm_(self._kept, 1.0)
        self._optimizer.step()
        return {name: value.detach() for name, value in parts.items()}

    def _captured(self, names: Names) -> Replayed:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(names)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parts = self._step(names)
        return graph, parts


def optimise(
    module: nn.Module,
    losses: Mapping[str, Callable[[], Tensor]],
    options: argparse.Namespace,
    name: str,
    seconds: float,
    after: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Minimise losses by AdamW with a cosine schedule over steps or time, whichever ends first.

    A loss of `EVERY` takes part in every so many steps.
    """
    steps = Steps(module, losses, next(module.parameters()).device)
    start, curve, seen = time.perf_counter(), list[dict[str, float]](), dict[str, float]()
    for step in range(options.steps):
        share = max(step / options.steps, (time.perf_counter() - start) / seconds)
        if share >= 1:
            break
        rate = options.rate * min(1.0, (step + 1) / 100) * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))
        parts = steps.run(tuple(each for each in losses if step % EVERY.get(each, 1) == 0), rate)
        after()
        if step % 200 == 0 or step + 1 == options.steps:
            seen |= {key: round(value.item(), 4) for key, value in parts.items()}
            curve.append({"step": step, **seen})
            print(f"{name}: {curve[-1]}, {time.perf_counter() - start:.0f} s", flush=True)
    return {"steps": step + 1, "s": round(time.perf_counter() - start, 1), "first": curve[0], "last": curve[-1]}


def tokens_of(latent: Tensor) -> Tensor:
    """Return latent tokens [B, n, patch * patch * channels] of [B, channels, y, x]. See `autoencoder.to_tokens`."""
    batch, channels, height, width = latent.shape
    grid = latent.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, PATCH * PATCH * channels)


def _signed(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def _encoded(encoder: VaeEncoder, pictures: Tensor, channels: int) -> Tensor:
    """Return means of the posterior. The encoder runs over parts of 256 pictures."""
    with torch.no_grad():
        return torch.cat([encoder(_signed(part))[:, :channels] for part in pictures.split(256)])


def train_autoencoder(sizes: Sizes, data: Data, options: argparse.Namespace) -> tuple[nn.ModuleDict, dict[str, Any]]:
    """Train the autoencoder, with little noise on its latents, so that small errors of the flow do no harm."""
    device, channels = data.pictures.device, sizes.vae.channels
    both = nn.ModuleDict({"encoder": VaeEncoder(sizes.vae), "decoder": VaeDecoder(sizes.vae)}).to(device)

    def loss() -> Tensor:
        given = _signed(data.pictures[torch.randint(len(data.pictures), (options.batch // 4 or 1,), device=device)])
        mean = both["encoder"](given)[:, :channels]
        made = both["decoder"](mean + 0.1 * torch.randn_like(mean))
        return mse_loss(made, given) + 1e-3 * mean.square().mean()

    return both, optimise(both, {"pixels": loss}, options, "autoencoder", options.seconds[0])


def reconstructed(both: nn.ModuleDict, sizes: Sizes, count: int, device: torch.device) -> float:
    """Return the share of unseen scenes that are recognised after encoding and decoding."""
    _, scenes, _, _ = shapes.split(SPLIT_SEED)
    chosen = scenes[:count]
    pictures = _planes([shapes.draw(each, random.Random(number)) for number, each in enumerate(chosen)], device)
    with torch.no_grad():
        made = both["decoder"](_encoded(both["encoder"], pictures, sizes.vae.channels))
    values = ((made * 0.5 + 0.5).clamp(0, 1) * 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return float(np.mean([shapes.shows(picture, scene) for picture, scene in zip(values, chosen, strict=True)]))


class Losses:
    """Losses of drawing, editing and describing, on random rows of the data."""

    def __init__(self, model: Miniature, data: Data, latents: tuple[Tensor, Tensor, Tensor], batch: int) -> None:
        self._model, self._data, self._batch = model, data, batch
        self._drawn, self._before, self._after = latents
        self._device = data.pictures.device

    def by_name(self) -> dict[str, Callable[[], Tensor]]:
        return {"draw": self.draw, "edit": self.edit, "describe": self.describe}

    def draw(self) -> Tensor:
        rows = self._rows(len(self._drawn))
        kv, kept = MaskedCache(len(rows)), self._kept(len(rows))
        texts = self._data.prompts.rows(2 * self._data.scenes[rows] + self._coin(len(rows)))
        self._model.read(kv, texts, torch.zeros_like(rows), kept)
        return self._flow(kv, self._drawn[rows], texts.lengths * kept)

    def describe(self) -> Tensor:
        rows = self._rows(len(self._drawn))
        every, kv = torch.ones_like(rows, dtype=torch.bool), MaskedCache(len(rows))
        self._model.see(kv, self._data.pictures[rows], 0, every)
        question = self._data.question.rows(torch.zeros_like(rows))
        self._model.read(kv, question, torch.ones_like(rows), every)
        # Decoding begins from the start id and ends with the end id, so an answer is a text segment.
        answer = self._data.prompts.rows(2 * self._data.scenes[rows])
        states = self._model.read(kv, answer, 1 + question.lengths, every)
        logits = self._model.llm.head(states[:, :-1].flatten(0, 1))
        wanted = torch.where(answer.valid, answer.ids, -100)[:, 1:]
        return cross_entropy(logits.float(), wanted.flatten(), ignore_index=-100)

    def edit(self) -> Tensor:
        rows = self._rows(len(self._before))
        kv, has_text, has_image = MaskedCache(len(rows)), self._kept(len(rows)), self._kept(len(rows))
        zeros = torch.zeros_like(rows)
        self._model.flow(kv, self._before[rows], zeros.float(), zeros, has_image)
        self._model.see(kv, self._data.before[rows], 1, has_image)
        texts = self._data.wishes.rows(self._data.edits[rows])
        self._model.read(kv, texts, 2 * has_image, has_text)
        return self._flow(kv, self._after[rows], 2 * has_image + texts.lengths * has_text)

    def _flow(self, kv: MaskedCache, data: Tensor, position: Tensor) -> Tensor:
        even = torch.rand(len(data), device=self._device)
        times = SHIFT * even / (1 + (SHIFT - 1) * even)
        noise, at = torch.randn_like(data), times[:, None, None]
        every = torch.ones(len(data), dtype=torch.bool, device=self._device)
        made = self._model.flow(kv, (1 - at) * data + at * noise, times, position, every)
        return mse_loss(made.float(), noise - data)

    def _rows(self, count: int) -> Tensor:
        return torch.randint(count, (self._batch,), device=self._device)

    def _kept(self, count: int) -> Tensor:
        return torch.rand(count, device=self._device) >= DROPPED

    def _coin(self, count: int) -> Tensor:
        return torch.randint(2, (count,), device=self._device)


def save(model: Miniature, autoencoder: nn.ModuleDict, folder: Path) -> None:
    """Write the weights in bfloat16 under the official names."""
    held = {**model.llm.state_dict(), **model.eyes.state_dict()}
    for file, values in ((MODEL_FILE, held), (VAE_FILE, autoencoder.state_dict())):
        kept = {name: value.detach().cpu().to(torch.bfloat16).contiguous() for name, value in values.items()}
        save_file(kept, folder / file, metadata={"format": "pt"})


def train(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train both stages and write the checkpoint. Returns the figures of the log."""
    torch.manual_seed(options.seed)
    if options.device == "cuda":
        # The modules choose CUDA kernels, which have no gradients, by `is_cuda`.
        torch.Tensor.is_cuda = property(lambda self: False)  # type: ignore[assignment,misc]
        torch.set_float32_matmul_precision("high")
    start, device = time.perf_counter(), torch.device(options.device)
    sizes = write_configs(folder)
    data = Data(sizes, folder, options)
    data_s = round(time.perf_counter() - start, 1)
    autoencoder, first = train_autoencoder(sizes, data, options)
    first["reconstructed"] = reconstructed(autoencoder, sizes, 128, device)
    print(f"autoencoder: {first}", flush=True)
    given = [
        _encoded(autoencoder["encoder"], each, sizes.vae.channels) for each in (data.pictures, data.before, data.after)
    ]
    shift, scale = given[0].mean().item(), 1 / given[0].std().item()
    sizes = write_configs(folder, scale, shift)
    drawn, before, after = (tokens_of((each - shift) * scale) for each in given)
    model = Miniature(sizes).to(device)
    averaged = copy.deepcopy(model)
    kept, moving, count = list(averaged.parameters()), list(model.parameters()), 0

    def average() -> None:
        nonlocal count
        count += 1
        with torch.no_grad():
            torch._foreach_lerp_(kept, moving, 1 - min(EMA, count / (count + 10)))

    second = optimise(
        model,
        Losses(model, data, (drawn, before, after), options.batch).by_name(),
        options,
        "model",
        options.seconds[1],
        average,
    )
    save(averaged, autoencoder, folder)
    log = {
        "seed": options.seed,
        "split": SPLIT_SEED,
        "device": options.device,
        "batch": options.batch,
        "parameters": sum(each.numel() for part in (model, autoencoder) for each in part.parameters()),
        "data_s": data_s,
        "autoencoder": first,
        "model": second,
    }
    (folder / "train.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    return log


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, nargs=2, default=(60.0, 380.0), help="of autoencoder and model")
    parser.add_argument("--steps", type=int, default=1_000_000, help="most steps of each stage")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pictures", type=int, default=24_000)
    parser.add_argument("--rate", type=float, default=2e-3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(json.dumps(train((found := parsed()).folder, found)))
