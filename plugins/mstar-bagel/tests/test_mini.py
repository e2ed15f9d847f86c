"""The trained miniature `bagel:mini`: it draws, describes and edits over HTTP, and a broken part is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import judge_shapes
import numpy as np
import pytest
import torch

from mstar_bagel import shapes
from mstar_bagel.checkpoint.shipped import FOLDER
from mstar_bagel.nodes import autoencoder, flow, language
from mstar_bagel.nodes.flow import FlowSteps
from mstar_bagel.params import Params, guidance
from mstar_bagel.request.prompt import PromptIds
from mstar_bagel.request.schedule import steps
from mstar_bagel.request.tokenizer import TextTokenizer
from tests.runtime.deployment import Deployment

from .conftest import BranchCache, Built, Run, build
from .test_http import BAGEL

POINTS = 20
"""Grid points of the flow."""
SCENES = 10
LEAST = 0.8
"""Share of few scenes that an intact miniature draws, and a broken one does not."""

Patch = pytest.MonkeyPatch


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with Deployment(served=BAGEL, name="mini", weights_source="mini", **request.param) as running:
        yield running.url


def test_unseen_scenes_are_drawn_described_and_recoloured(url: str) -> None:
    with judge_shapes.Served(url, POINTS) as served:
        verdict = judge_shapes.judge(served, SCENES)
    assert verdict["drawn"] >= LEAST, verdict
    assert verdict["described"] >= 0.9, verdict
    assert verdict["edited"] >= 0.9, verdict


# -- in one process ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mini() -> Built:
    return build(FOLDER)


def drawn(mini: Built, count: int) -> float:
    """Return the share of so many unseen scenes that are drawn right, with guidance."""
    _, scenes, _, _ = shapes.split(judge_shapes.SPLIT_SEED)
    return float(
        np.mean([shapes.shows(painted(mini, scene, seed), scene) for seed, scene in enumerate(scenes[:SCENES])])
    )


def painted(mini: Built, scene: shapes.Scene, seed: int) -> shapes.Pixels:
    """Return the picture of a scene: its text in one cache, nothing in that of the guidance."""
    run, params = Run(mini), Params(num_timesteps=POINTS)
    run.text(PromptIds(TextTokenizer(FOLDER), mini.sizes.ids).text(scene.sentence), run.caches["main"])
    side, guide = shapes.SIDE // mini.sizes.token_pixels, guidance(params, is_edit=False)
    combine, grid = FlowSteps(mini.sizes.latent_width, torch.device("cpu")), steps(POINTS, params.timestep_shift)
    (x,) = combine(grid=[np.zeros((side, side), np.uint8)], seeds=np.array([seed]))["latents"]
    numbers = np.array([*guide.numbers(), len(grid)], np.float32)
    for number, (time, *_) in enumerate(grid):
        velocity, blind = (run.velocity(x, float(time), run.caches[name]) for name in ("main", "cfg_text"))
        (x,) = combine(
            latents=[x],
            v=[velocity],
            v_text=[blind],
            guidance=[numbers],
            times=[grid],
            step=np.array([number]),
            seeds=np.zeros(1),
        )["latents"]
    made: shapes.Pixels = mini.decoder.pixels(mini.decoder.decode(x)).numpy()
    return made


def test_unseen_scenes_are_drawn_in_one_process(mini: Built) -> None:
    assert drawn(mini, SCENES) >= LEAST


def causal_masks_in_images(patch: Patch) -> None:
    true = BranchCache.attend

    def attend(self: BranchCache, *args: Any, **named: Any) -> torch.Tensor:
        self.is_causal = True
        return true(self, *args, **named)

    patch.setattr(BranchCache, "attend", attend)


def rows_for_columns(patch: Patch) -> None:
    def forward(self: Any, height: int, width: int) -> torch.Tensor:
        table: torch.Tensor = self.pos_embed.view(self.side, self.side, -1).transpose(0, 1)
        return table[:height, :width].flatten(0, 1)

    patch.setattr(flow.GridTable, "forward", forward)


def guidance_away_from_the_text(patch: Patch) -> None:
    true = flow.guided
    patch.setattr(flow, "guided", lambda v, v_text, v_image, **named: true(v_text, v, v_image, **named))


def heads_without_norms(patch: Patch) -> None:
    def project(self: Any, x: torch.Tensor, head_dim: int) -> Any:
        return tuple(layer(x).unflatten(-1, (-1, head_dim)) for layer in (self.query, self.key, self.value))

    patch.setattr(language.AttentionExpert, "project", project)


def patches_by_columns(patch: Patch) -> None:
    true = autoencoder.from_tokens
    patch.setattr(autoencoder, "from_tokens", lambda tokens, side: true(tokens.transpose(0, 1), side))


def time_in_thousandths(patch: Patch) -> None:
    true = flow.time_features
    patch.setattr(flow, "time_features", lambda times: true(times * 1000))


@pytest.mark.parametrize(
    "broken",
    [
        causal_masks_in_images,
        rows_for_columns,
        guidance_away_from_the_text,
        heads_without_norms,
        patches_by_columns,
        time_in_thousandths,
    ],
)
def test_a_broken_part_is_noticed(broken: Callable[[Patch], None], mini: Built, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    assert drawn(mini, SCENES // 2) < LEAST
