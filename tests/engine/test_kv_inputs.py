"""Inputs with one value per sequence share a forward, and fractional positions are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mstar_core.engine.base import LoopSpec
from mstar_core.graph.declare.nodes import KV_CACHE, Attend, KVSpec, NodeSpec, Sampling
from mstar_core.layers.kv_view import KVView
from tests.engine.tiny_engine import LM, VOCAB, WIDTH, Driver, TinyLM, make_engine, prompt

GROUPS = 4
TALKER = NodeSpec(
    name="talker",
    engine=KV_CACHE,
    ports={"states": "f32[n,32]?", "frame": f"i64[{GROUPS}]", "scale": "f32", "code": "i64[1]"},
    kv=KVSpec(layers=2, kv_heads=2, head_dim=8),
    sampling=Sampling(port="code"),
    sequence=("states",),
)


class Talker(nn.Module):
    """Reads a state and the last frame of codes, draws the first code of a frame and computes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()
        self.frames: list[tuple[int, ...]] = []

    def forward(
        self,
        kv: KVView,
        positions: Tensor,
        states: Tensor | None = None,
        frame: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = torch.zeros(positions.shape[-1], WIDTH) if states is None else states
        if frame is None:
            return self.lm(kv, positions, embeds=x)
        assert scale is not None
        self.frames.append(tuple(frame.shape))
        outputs = self.lm(kv, positions, embeds=x + self.lm.embed(frame).sum(1) * scale[:, None])
        first = outputs["hidden"].argmax(dim=1, keepdim=True)
        return {**outputs, "frame": (frame * 3 + first) % VOCAB}

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm.head(hidden)


def speak(seeds: list[int], *, with_states: bool) -> tuple[list[Tensor], list[list[Tensor]], Talker]:
    """Frames that requests end with, what they emit, and the module, which was run for all of them together."""
    module = Talker()
    driver = Driver(make_engine(spec=TALKER, module=module))
    loop = LoopSpec(max_iters=6, carry={"frame": "frame"}, fused=True, emit=("frame",))
    keys = []
    for handle, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        driver.open(handle)
        driver.submit(handle, inputs={"states": torch.randn(3 + seed, WIDTH, generator=generator)}, sample=False)
        inputs = {"frame": torch.randint(0, VOCAB, (GROUPS,), generator=generator), "scale": torch.tensor(0.5)}
        if with_states:
            inputs["states"] = torch.randn(1, WIDTH, generator=generator)
        keys.append(driver.submit(handle, inputs=inputs, loop=loop, attend=Attend(tokens=1), outputs=("frame",)))
    driver.run()
    assert not driver.failed, driver.failed
    frames = [driver.done[key].outputs["frame"] for key in keys]
    return frames, [[item.outputs["frame"] for item in driver.emissions[key]] for key in keys], module


@pytest.mark.parametrize("with_states", [True, False])
def test_sequences_with_a_value_of_fixed_shape_share_each_forward(with_states: bool) -> None:
    frames, emitted, module = speak([0, 1, 2], with_states=with_states)
    assert module.frames == [(3, GROUPS)] * 6
    for seed in range(3):
        (alone,), (own,), _ = speak([seed], with_states=with_states)
        assert alone.shape == frames[seed].shape == (GROUPS,)
        assert torch.equal(alone, frames[seed])
        assert len(own) == 6 and all(map(torch.equal, own, emitted[seed]))


# -- fractional positions ----------------------------------------------------------------------------------------------

FILM = replace(LM, ports={**LM.ports, "positions": "f32[n]"})
WHERE = [0.0, 1.0, 2.0, 2.65, 3.3, 3.95]


class Recorder(TinyLM):
    """Records the positions that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, kv: KVView, positions: Tensor, **ports: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        self.seen.append(positions.clone())
        return super().forward(kv, positions, **ports)


def watch(driver: Driver, handle: int, steps: int) -> int:
    """A film at fractional positions, then a text, then a decode loop. Returns the key of the loop."""
    ids = prompt(handle, len(WHERE))
    driver.open(handle)
    film = {"tokens": torch.tensor(ids), "positions": torch.tensor(WHERE)}
    driver.submit(handle, inputs=film, attend=Attend(positions="given"), sample=False)
    driver.prefill(handle, prompt(handle + 50, 5))
    return driver.decode(handle, steps)


def test_text_and_decode_continue_at_fractional_positions() -> None:
    module = Recorder()
    driver = Driver(make_engine(spec=FILM, module=module))
    watch(driver, 0, 3)
    driver.run()
    assert not driver.failed, driver.failed
    seen = torch.cat(module.seen)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen, torch.tensor([*WHERE, *(3.95 + each for each in range(1, 9))]))


def test_decode_equals_single_passes_at_given_positions() -> None:
    driver = Driver(make_engine(spec=FILM))
    key = watch(driver, 0, 6)
    driver.run()
    plain = Driver(make_engine(spec=FILM))
    plain.open(0)
    ids, where = prompt(0, len(WHERE)) + prompt(50, 5), [*WHERE, *(3.95 + each for each in range(1, 6))]
    drawn: list[int] = []
    while len(drawn) < 7:
        inputs = {"tokens": torch.tensor(ids), "positions": torch.tensor(where)}
        single = plain.submit(0, inputs=inputs, attend=Attend(positions="given"), outputs=("token",))
        plain.run()
        drawn.append(int(plain.done[single].outputs["token"]))
        ids, where = [drawn[-1]], [where[-1] + 1]
    assert driver.ids[key] == drawn[1:]


@pytest.mark.parametrize("changes", [{"num_pages": 14}, {"graphs": (1, 4)}, {"lookahead": 1}, {"token_budget": 4}])
def test_fractional_positions_survive_preemption_graphs_and_chunks(changes: dict[str, object]) -> None:
    def run(**settings: object) -> list[list[int]]:
        driver = Driver(make_engine(spec=FILM, **settings), int(settings.get("lookahead", 0)))  # type: ignore[call-overload]
        keys = [watch(driver, handle, 12) for handle in range(3)]
        driver.run()
        assert not driver.failed, driver.failed
        assert "num_pages" not in settings or driver.engine.memory().preempted
        return [driver.ids[key] for key in keys]

    assert run(**changes) == run()


def test_positions_keep_their_precision_in_a_bfloat16_node() -> None:
    module = Recorder().to(torch.bfloat16)
    driver = Driver(make_engine(spec=FILM, module=module, dtype=torch.bfloat16))
    driver.open(0)
    given = torch.tensor([300.0, 301.5])
    inputs = {"tokens": torch.tensor([1, 2]), "positions": given}
    driver.submit(0, inputs=inputs, attend=Attend(positions="given"), sample=False)
    driver.run()
    assert torch.equal(module.seen[0], given)


# -- images with tokens of their own ----------------------------------------------------------------------------------

EASEL = NodeSpec(
    name="easel",
    engine=KV_CACHE,
    ports={"image": "f32[h,w,32]", "scale": "f32[1]", "velocity": "f32[h,w,32]"},
    kv=KVSpec(layers=2, kv_heads=2, head_dim=8),
    sequence=("image",),
    row_ports=("image", "scale", "velocity"),
    batch_key=("scale",),
)


class Easel(nn.Module):
    """Returns a velocity for each image, whatever its size. It adds one token to those of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()
        self.batches: list[list[tuple[int, ...]]] = []

    def forward(self, kv: KVView, positions: Tensor, image: Tensor | list[Tensor], scale: Tensor) -> dict[str, object]:
        images = list(image)
        self.batches.append([tuple(each.shape) for each in images])
        x = torch.cat([part for each in images for part in (each.flatten(0, 1), torch.ones(1, WIDTH))])
        hidden = self.lm(kv, positions, embeds=x)["hidden"].split(
            [each.shape[0] * each.shape[1] + 1 for each in images]
        )
        found = [part[:-1].view(each.shape) for part, each in zip(hidden, images, strict=True)]
        return {"velocity": torch.stack(found) if isinstance(image, Tensor) else found}


def look(shapes: list[tuple[int, int]]) -> tuple[list[Tensor], Easel]:
    module = Easel()
    driver = Driver(make_engine(spec=EASEL, module=module))
    keys = []
    for handle, (height, width) in enumerate(shapes):
        image = torch.randn(height, width, WIDTH, generator=torch.Generator().manual_seed(height * 10 + width))
        driver.open(handle)
        attend = Attend(mask="full", positions="shared", extra=1, write=False)
        inputs = {"image": image, "scale": torch.ones(1)}
        keys.append(driver.submit(handle, inputs=inputs, attend=attend, outputs=("velocity",), sample=False))
    driver.run()
    assert not driver.failed, driver.failed
    return [driver.done[key].outputs["velocity"] for key in keys], module


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 3)], [(2, 3), (4, 1), (1, 5)]], ids=["equal", "different"])
def test_images_of_any_size_share_a_forward_and_keep_their_values(shapes: list[tuple[int, int]]) -> None:
    together, module = look(shapes)
    assert module.batches == [[(*shape, WIDTH) for shape in shapes]]
    for shape, found in zip(shapes, together, strict=True):
        (alone,), _ = look([shape])
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)
