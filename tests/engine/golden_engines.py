"""The references of Pi0.5 and V-JEPA 2 through the engines, on any device: what the CPU's and the GPU's tests share.

The sets are those of the plugins' own tests; MSTAR_GOLDEN names another folder that holds `pi05/` and `vjepa2/`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.families.policy import Acting, Observation, Place, checkpoint_modules
from bench.families.world import Rolling, Trial, checkpoint_nodes
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.plugin.model import ModelContext
from mstar_vjepa2.model import Vjepa2
from mstar_vjepa2.nodes.encoder import ClipEncoder
from mstar_vjepa2.plugin import mstar_models

ROOT: Final = Path(__file__).resolve().parents[2]
Graphs = Callable[[], GraphCache] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest allowed differences of results, absolute or (`is_relative`) relative."""

    actions: float
    frames: float
    clips: float
    is_relative: bool = False

    def check(self, found: Tensor, expected: Tensor, limit: float, what: str) -> None:
        """Raise AssertionError with the difference when it is over the limit."""
        gap = difference(found, expected, is_relative=self.is_relative)
        assert gap <= limit, f"{what}: {gap:.3g} over {limit:g}"


FLOAT32: Final = Limits(actions=2e-4, frames=2e-4, clips=1e-4)
"""Largest difference; source: the golden folders' READMEs, the column of a GPU without TF32."""

BFLOAT16: Final = Limits(actions=2e-2, frames=5e-2, clips=2e-2, is_relative=True)
"""||out - ref|| / ||ref||; source: the proposal of V-JEPA's README, for actions the error of bfloat16 on a CPU."""


def difference(found: Tensor, expected: Tensor, *, is_relative: bool) -> float:
    """Largest difference, or ||found - expected|| / ||expected||, in float64; infinite if a value is not finite."""
    a, b = found.detach().cpu().double(), expected.double()
    if not a.isfinite().all():
        return float("inf")
    return float((a - b).norm() / b.norm()) if is_relative else float((a - b).abs().max())


def golden(name: str) -> Path:
    """The folder of a family's references."""
    given = os.environ.get("MSTAR_GOLDEN")
    return Path(given) / name if given else ROOT / "plugins" / f"mstar-{name}" / "tests" / "golden"


# -- Pi0.5 -----------------------------------------------------------------------------------------------------------


def policy(place: Place, tmp: Path, graphs: Graphs = None) -> Acting:
    """The golden Pi0.5 around its engines."""
    folder, source = tmp / "pi05", golden("pi05")
    if not folder.exists():
        folder.mkdir(parents=True)
        shutil.copyfile(source / "config.json", folder / "config.json")
        shutil.copyfile(source / "weights.safetensors", folder / "model.safetensors")
    sizes, modules = checkpoint_modules(folder, place)
    return Acting(sizes, modules, place, graphs)


def observations() -> tuple[list[Observation], Tensor]:
    """The golden requests, with different cameras and prompts, and their actions float32 [items, horizon, 32]."""
    given = load_file(golden("pi05") / "inputs.safetensors")
    (path,) = golden("pi05").glob("expected_*steps.safetensors")
    expected = load_file(path)
    steps, found = len(expected["time"]), []
    for item in range(len(given["tokens"])):
        images = given["images"][item][given["image_masks"][item]].permute(0, 2, 3, 1).contiguous()
        ids = given["tokens"][item][given["token_masks"][item]]
        found.append(Observation(images=images, ids=ids, noise=given["noise"][item], steps=steps))
    return found, expected["actions"]


def check_policy(acting: Acting, limits: Limits) -> None:
    """Each request alone and all together, plainly and then by graphs, against the reference."""
    seen, expected = observations()
    for _ in range(2):
        together = acting.act(*seen)
        alone = [acting.act(each)[0] for each in seen]
        for item, (first, second) in enumerate(zip(together, alone, strict=True)):
            limits.check(first, expected[item], limits.actions, f"item {item} among others")
            limits.check(second, expected[item], limits.actions, f"item {item} alone")
        acting.driver.capture()


# -- V-JEPA 2 and 2-AC -----------------------------------------------------------------------------------------------


def world(place: Place, tmp: Path, graphs: Graphs = None) -> Rolling:
    """The golden V-JEPA 2-AC around its engines."""
    folder = _laid_out(tmp / "vjepa2_ac", golden("vjepa2") / "ac")
    facts, nodes = checkpoint_nodes(folder, place)
    return Rolling(facts, nodes, place, frames=8, graphs=graphs)


def trials() -> dict[str, tuple[Trial, Tensor]]:
    """Rollouts from one frame and from two, with the last frames that they reach: [K, S, width]."""
    folder = golden("vjepa2") / "ac"
    given, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    clip, known = given["clip"][0].transpose(0, 1).contiguous(), given["ctx_states"].shape[1] - 1
    one = Trial(
        clip=clip[:1],
        states=given["roll_state0"][0],
        known=given["roll_actions"][0, :0],
        candidates=given["roll_actions"],
    )
    two = Trial(
        clip=clip[: known + 1],
        states=given["ctx_states"][0],
        known=given["ctx_actions"][0, :known],
        candidates=given["ctx_actions"][:, known:],
    )
    return {"one frame": (one, expected["roll_latents"][:, -1]), "two frames": (two, expected["ctx_latents"][:, -1])}


def check_world(rolling: Rolling, limits: Limits) -> None:
    """Every rollout, plainly and then by graphs, against the reference."""
    for _ in range(2):
        for name, (trial, expected) in trials().items():
            limits.check(rolling.whole(trial)[:, 0], expected, limits.frames, name)
        rolling.driver.capture()


def clip_encoder(place: Place, tmp: Path) -> ClipEncoder:
    """The golden V-JEPA 2's encoder."""
    folder = _laid_out(tmp / "vjepa2", golden("vjepa2") / "base")
    spec = next(spec for spec in mstar_models() if spec.name == "vjepa2").bound(folder, {})
    context = ModelContext(
        spec=spec, folder=folder, device=place.device, dtype=place.dtype, model_kwargs=spec.model_kwargs
    )
    node = Vjepa2(context).get_submodule(spec.node("video_encoder"))
    assert isinstance(node, ClipEncoder)
    return node


def check_clips(node: ClipEncoder, place: Place, limits: Limits, captures: GraphCache) -> None:
    """Golden clips, plainly and then by graphs, against the reference."""
    folder = golden("vjepa2") / "base"
    pixels = load_file(folder / "inputs.safetensors")["pixel_values_videos"].to(place.device)
    expected = load_file(folder / "expected.safetensors")["last_hidden_state"]
    node.encoder.capture(captures)
    with torch.inference_mode():
        for _ in range(2):
            made = node(pixel_values_videos=pixels)["encoder_hidden"]
            assert isinstance(made, Tensor)
            limits.check(made, expected, limits.clips, "clips")
            while node.idle():
                pass


def _laid_out(folder: Path, source: Path) -> Path:
    if not folder.exists():
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(source / name, folder / name)
    return folder
