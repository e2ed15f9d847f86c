"""Every network and whole loops against `diffusers` and `transformers`, at other sizes than the stored vectors have.

Run when diffusers 0.42 is installed, which nothing else needs: `pip install --no-deps diffusers==0.42.1`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mstar_core.parallel.shards import WHOLE
from mstar_wan22.checkpoint.config import (
    A14B,
    MEAN_16,
    MEAN_48,
    STD_16,
    STD_48,
    Sizes,
    TextSizes,
    TransformerSizes,
    VaeSizes,
    read_sizes,
)
from mstar_wan22.checkpoint.weights import load
from mstar_wan22.nodes.solver import HISTORY, advance
from mstar_wan22.nodes.text import TextEncoder
from mstar_wan22.nodes.transformer import TEXT_ROWS, Denoiser, Transformer, keep_floats
from mstar_wan22.nodes.vae import Decoder, Encoder
from mstar_wan22.request.schedule import step_table
from mstar_wan22.sources.mini import FOLDER as MINI
from mstar_wan22.sources.tiny import write_random

from .conftest import close

diffusers: Any = pytest.importorskip("diffusers", reason="runs when diffusers is installed, see the module")
transformers: Any = pytest.importorskip("transformers")

LIMIT = 1e-4
STEPS = 7
TEXT = TextSizes(width=40, head_dim=12, inner=56, layers=2, heads=3, vocab=140)
IMAGES: Sizes = Sizes(
    text=TEXT,
    transformer=TransformerSizes(
        heads=3, head_dim=28, layers=3, inner=72, text=40, frequencies=48, inputs=6, outputs=6
    ),
    vae=VaeSizes(base=6, decoder_base=8, channels=6, mean=MEAN_48[:6], std=STD_48[:6]),
)
EXPERTS: Sizes = replace(
    A14B,
    text=TEXT,
    transformer=TransformerSizes(
        heads=5, head_dim=24, layers=2, inner=60, text=40, frequencies=32, inputs=6, outputs=6
    ),
    vae=VaeSizes(
        base=8, decoder_base=8, channels=6, blocks=1, is_residual=False, fold=1, mean=MEAN_16[:6], std=STD_16[:6]
    ),
)


@pytest.fixture(scope="module", params=["wan22", "wan22_a14b", "wan22:mini"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "wan22:mini":
        return MINI
    folder = tmp_path_factory.mktemp("checkpoint")
    write_random(folder, IMAGES if request.param == "wan22" else EXPERTS)
    return folder


def theirs(name: str, folder: Path) -> Any:
    """Return a network of diffusers with the weights of a folder."""
    fields = json.loads((folder / "config.json").read_text())
    network = getattr(diffusers, name)(**fields)
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    network.load_state_dict({key: value.float() for key, value in stored.items()})
    return network.eval()


def ours(network: nn.Module, node: str, folder: Path) -> Any:
    if isinstance(network, Transformer):
        keep_floats(network)
    load(network, node, folder, None)
    return network.eval()


def texts(folder: Path) -> list[Tensor]:
    """Return the vectors of two texts, after a comparison with the reference's."""
    encoder = ours(TextEncoder(read_sizes(folder).text), "text_encoder", folder)
    reference = transformers.UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()
    found = []
    for ids in (torch.tensor([*range(5, 15), 1]), torch.tensor([5, 9, 1])):
        found.append(encoder.encoded(ids)[-1])
        close(found[-1], reference(ids[None], attention_mask=torch.ones(1, len(ids))).last_hidden_state[0], LIMIT)
    return found


def padded(text: Tensor) -> Tensor:
    return nn.functional.pad(text, (0, 0, 0, TEXT_ROWS - len(text)))[None]


@torch.no_grad()
@pytest.mark.parametrize("grid", [(4, 6, 8), (1, 2, 10)])
def test_texts_and_velocities(folder: Path, grid: tuple[int, int, int]) -> None:
    sizes = read_sizes(folder)
    text, _ = texts(folder)
    network = ours(Transformer(sizes.transformer, WHOLE), "transformer", folder)
    x = torch.randn((2, sizes.transformer.inputs, *grid), generator=torch.Generator().manual_seed(1))
    times = torch.tensor([731, 250])
    found = network(x, times[:, None].float(), (x[0, 0].numel() // network.patch_tokens,), [text, text])
    reference = theirs("WanTransformer3DModel", folder / "transformer")
    close(found, reference(x, times, padded(text).expand(2, -1, -1), return_dict=False)[0], LIMIT)


@torch.no_grad()
def test_latents_and_frames(folder: Path) -> None:
    sizes = read_sizes(folder).vae
    reference, draw = theirs("AutoencoderKLWan", folder / "vae"), torch.Generator().manual_seed(2)
    latents = torch.randn((sizes.channels, 3, 2, 3), generator=draw)
    decoder = ours(Decoder(sizes), "vae_decoder", folder)
    raw = decoder.denormalised(latents)[None]
    close(decoder.decode(latents), reference.decode(raw, return_dict=False)[0][0], LIMIT)
    if sizes.frames == VaeSizes().frames:  # the reference's encoder knows no other chunks
        video = torch.rand((3, 9, 2 * sizes.pixels, 3 * sizes.pixels), generator=draw) * 2 - 1
        encoder = ours(Encoder(sizes), "vae_encoder", folder)
        close(encoder.moments(video)[: sizes.channels], reference.encode(video[None]).latent_dist.mean[0], LIMIT)


@torch.no_grad()
def test_whole_loops(folder: Path) -> None:
    sizes = read_sizes(folder)
    text, negative = texts(folder)
    noise = torch.randn((sizes.vae.channels, 3, 8, 4), generator=torch.Generator().manual_seed(3))
    scales = (4.0, 3.0) if sizes.has_experts else (5.0, 5.0)
    names = ("transformer", "transformer_2") if sizes.has_experts else ("transformer",)
    more = {"transformer_2": theirs("WanTransformer3DModel", folder / names[-1])} if sizes.has_experts else {}
    pipeline = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=theirs("AutoencoderKLWan", folder / "vae"),
        scheduler=diffusers.UniPCMultistepScheduler.from_pretrained(folder / "scheduler"),
        transformer=theirs("WanTransformer3DModel", folder / "transformer"),
        boundary_ratio=sizes.boundary,
        expand_timesteps=sizes.expands,
        **more,
    )
    pipeline.set_progress_bar_config(disable=True)
    wanted = pipeline(
        prompt_embeds=padded(text),
        negative_prompt_embeds=padded(negative),
        height=8 * sizes.vae.pixels,
        width=4 * sizes.vae.pixels,
        num_frames=2 * sizes.vae.frames + 1,
        num_inference_steps=STEPS,
        guidance_scale=scales[0],
        guidance_scale_2=scales[1] if sizes.has_experts else None,
        latents=noise[None].clone(),
        output_type="latent",
        return_dict=False,
    )[0]
    table, first = step_table(STEPS, sizes.flow_shift, scales, sizes.boundary, "diffusers", "unipc")
    experts = [
        Denoiser(ours(Transformer(sizes.transformer, WHOLE), name, folder), expands=sizes.expands) for name in names
    ]
    x, history = noise, noise.new_zeros(HISTORY, *noise.shape)
    for number, row in enumerate(table):
        expert = experts[0 if number < first else -1]
        x, history = advance(x, history, expert.guided(x, row, [text, negative], None), row)
    assert 0 < first <= STEPS and (first < STEPS) == sizes.has_experts
    close(x, wanted[0], LIMIT)
