"""A tiny speech model: frames from a small predictor with random numbers, text ids from a stream, state per sequence.

Also its reference: the same module, one sequence, plain attention over all tokens, and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from mstar_core.engine.base import Handle, JobKey, LoopSpec
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.compile.resident import LoopPorts
from mstar_core.graph.declare.nodes import KV_CACHE, RANDOM, Attend, KVSpec, NodeSpec, Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import rng
from mstar_core.layers.kv_view import KVView
from tests.engine.exact_draw import sample
from tests.engine.tiny_engine import LAYERS, VOCAB, WIDTH, Driver, TinyLM, make_engine

GROUPS = 4
OPENING = 3
TALKER = NodeSpec(
    name="Talker",
    engine=KV_CACHE,
    ports={
        "tokens": "i64[n]?",
        "text": "i64[1]?",
        "code0": "i64[1]",
        "frame": f"i64[{GROUPS}]",
        "last_hidden": f"any[{WIDTH}]",
        "text_ended": "b8[1]",
        "random": f"f32[{GROUPS - 1}]",
        "voice": "i64",
        "heat": "f32",
        "bias": f"f32[{WIDTH}]",
    },
    kv=KVSpec(layers=LAYERS, kv_heads=2, head_dim=8),
    sampling=Sampling(port="code0", prefix="talker_", history="output"),
    sequence=("tokens",),
)
PORTS = LoopPorts(
    id_port="code0",
    states=(("last_hidden", "last_hidden"), ("text_ended", "text_ended")),
    constants=("$param:heat", "bias"),
    feed="text",
    random=True,
)
CARRY = {"code0": "code0", "last_hidden": "last_hidden", "text_ended": "text_ended"}
STATES = ("code0", "last_hidden", "text_ended")


class TinyTalker(nn.Module):
    """Blocks of TinyLM over frames and text. steps: sequences of each decode forward."""

    known_ports = ("frame",)

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM(sharpness=3.0)
        generator = torch.Generator().manual_seed(11)

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False)

        self.codes, self.heads = table(GROUPS, VOCAB, WIDTH), table(GROUPS - 1, WIDTH, VOCAB)
        self.words, self.voices, self.ended, self.padding = (
            table(VOCAB, WIDTH),
            table(4, WIDTH),
            table(WIDTH),
            table(WIDTH),
        )
        self.steps: list[int] = []

    def forward(
        self,
        kv: KVView,
        positions: Tensor,
        text: Tensor,
        voice: Tensor | None = None,
        code0: Tensor | None = None,
        last_hidden: Tensor | None = None,
        text_ended: Tensor | None = None,
        random: Tensor | None = None,
        heat: Tensor | None = None,
        bias: Tensor | None = None,
        known: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if known is not None:
            assert text_ended is not None
            return self._known(known, text, text_ended, kv, positions)
        if code0 is None:
            assert voice is not None
            rows = len(text)
            opening = [
                self.voices[voice.view(rows, OPENING)[:, 0]],
                self.padding.expand(rows, -1),
                self.words[text[:, 0]],
            ]
            hidden = self._blocks(torch.stack(opening, dim=1).view(-1, WIDTH), kv, positions)
            ended = torch.zeros((rows, 1), dtype=torch.bool, device=text.device)
            return {"hidden": hidden, "last_hidden": hidden.view(rows, OPENING, WIDTH)[:, -1], "text_ended": ended}
        assert last_hidden is not None and text_ended is not None and random is not None
        assert heat is not None and bias is not None
        assert code0.shape == text.shape == heat.shape and text_ended.shape == (len(code0), 1)
        self.steps.append(len(code0))
        frame = self._frame(code0, last_hidden + bias, random, heat)
        said = torch.where(text_ended, self.padding, torch.where(text[:, None] < 0, self.ended, self.words[text]))
        x = said + sum(self.codes[group][frame[:, group]] for group in range(GROUPS))
        hidden = self._blocks(x, kv, positions)
        return {"hidden": hidden, "last_hidden": hidden, "text_ended": text_ended | (text[:, None] < 0), "frame": frame}

    def _known(
        self, frames: Tensor, text: Tensor, text_ended: Tensor, kv: KVView, positions: Tensor
    ) -> dict[str, Tensor]:
        """Iterations of one sequence whose frames are known."""
        assert text_ended.shape == (1, 1) and len(frames) == len(text)
        none = (text < 0)[:, None]
        ended = text_ended | (none.cumsum(dim=0) > 0)
        before = torch.cat([text_ended, ended[:-1]])
        said = torch.where(before, self.padding, torch.where(none, self.ended, self.words[text]))
        x = said + sum(self.codes[group][frames[:, group]] for group in range(GROUPS))
        hidden = self._blocks(x, kv, positions)
        return {"hidden": hidden, "last_hidden": hidden, "text_ended": ended, "frame": frames}

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm.head(hidden)

    def _frame(self, code0: Tensor, hidden: Tensor, random: Tensor, heat: Tensor) -> Tensor:
        codes = [code0]
        for group in range(GROUPS - 1):
            logits = (hidden + self.codes[group][codes[-1]]) @ self.heads[group] / heat[:, None]
            mass = logits.double().softmax(dim=-1).cumsum(dim=-1)
            codes.append((mass <= random[:, group, None]).sum(dim=-1).clamp(max=VOCAB - 1))
        return torch.stack(codes, dim=1)

    def _blocks(self, x: Tensor, kv: KVView, positions: Tensor) -> Tensor:
        rotation = self.lm.rotary(positions)
        for block in self.lm.blocks:
            x = block(x, kv, rotation)
        return self.lm.norm(x)


class PlainView:
    """Attention of one sequence over everything before, without pages."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        before = self.keys[layer].shape[0] if layer in self.keys else 0
        if before:
            key, value = torch.cat([self.keys[layer], key]), torch.cat([self.values[layer], value])
        self.keys[layer], self.values[layer] = key, value
        repeats = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, k) * (scale or query.shape[-1] ** -0.5)
        seen = torch.arange(len(key))[None] <= (torch.arange(len(query)) + before)[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


@dataclass(frozen=True)
class Speech:
    """One request: its text ids after the first, and its parameters."""

    first: int = 5
    text: tuple[int, ...] = (7, 9, 11)
    steps: int = 9
    stop: int = -2
    voice: int = 1
    heat: float = 1.0
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def bias(self) -> Tensor:
        return torch.linspace(-self.heat, self.heat, WIDTH)


WARM = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.05, seed=5)
SPEECHES = (
    Speech(sampling=WARM),
    Speech(first=3, text=tuple(range(20)), steps=14, voice=2, heat=0.7),
    Speech(first=1, text=(), steps=6, sampling=SamplingParams(temperature=1.0, top_p=0.8, seed=-9)),
    Speech(text=(4,), steps=20, heat=1.3, sampling=SamplingParams(temperature=0.7, seed=5)),
    Speech(first=8, text=tuple(range(30, 40)), steps=11, sampling=SamplingParams(temperature=1.1, seed=77)),
)


@torch.inference_mode()
def reference(speech: Speech, name: str = TALKER.name) -> tuple[list[int], list[list[int]]]:
    """Ids and frames of one request, by the rules in plain words."""
    module, view, params = TinyTalker(), PlainView(), speech.sampling
    states = rng.named_host(np.array([params.seed]), crc32(f"{name}{RANDOM}".encode()))
    seen = torch.zeros((1, VOCAB), dtype=torch.bool)
    ids: list[int] = []
    frames: list[list[int]] = []

    def draw(hidden: Tensor) -> None:
        counter = torch.tensor([len(ids)])
        drawn = sample(module.head(hidden[-1:]), [params], seen, counter)
        seen[0, drawn] = True
        ids.append(int(drawn))

    voice = torch.full((OPENING,), speech.voice)
    out = module(kv=view, positions=torch.arange(OPENING), text=torch.tensor([[speech.first]]), voice=voice)
    draw(out["hidden"])
    for step in range(speech.steps):
        if ids[-1] == speech.stop:
            break
        text = speech.text[step] if step < len(speech.text) else -1
        random = rng.uniforms_host(states, np.array([len(ids)]), GROUPS - 1)
        out = module(
            kv=view,
            positions=torch.tensor([OPENING + step]),
            text=torch.tensor([text]),
            code0=torch.tensor(ids[-1:]),
            last_hidden=out["last_hidden"],
            text_ended=out["text_ended"],
            random=torch.from_numpy(random),
            heat=torch.tensor([speech.heat]),
            bias=speech.bias[None],
        )
        frames.append(out["frame"][0].tolist())
        draw(out["hidden"])
    return ids, frames


def make_talker(**changes: object) -> KVCacheEngine:
    """A small CPU engine around TinyTalker."""
    settings: dict[str, object] = {"spec": TALKER, "module": TinyTalker(), "loop": PORTS, "prefix_cache": False}
    return make_engine(**{**settings, **changes})


@dataclass
class Talk:
    """One request in an engine: its jobs, and the items that it still waits for."""

    driver: Driver
    handle: int
    speech: Speech
    first: int = 0
    loop: int = 0
    fed: int = 0

    def open(self, **loop: object) -> Talk:
        speech, driver = self.speech, self.driver
        driver.open(self.handle, speech.sampling, max_tokens=OPENING + speech.steps + 1)
        self.first = self.begin()
        self.loop = self.decode(speech.steps, **loop)
        return self

    def begin(self, **fields: object) -> int:
        speech = self.speech
        inputs = {"text": torch.tensor([speech.first]), "$param:voice": torch.tensor(speech.voice)}
        attend = Attend(tokens=OPENING)
        return self.driver.submit(self.handle, inputs=inputs, outputs=STATES, attend=attend, **fields)

    def decode(self, steps: int, **changes: object) -> int:
        fields: dict[str, object] = {
            "max_iters": steps,
            "carry": CARRY,
            "stop_port": "code0",
            "stop_ids": (self.speech.stop,),
            "emit": ("frame",),
            "feed": "text",
            "after_end": "empty",
        }
        loop = LoopSpec(**{**fields, **changes})  # type: ignore[arg-type]
        inputs = {"$param:heat": torch.tensor(self.speech.heat), "bias": self.speech.bias}
        return self.driver.submit(self.handle, inputs=inputs, outputs=STATES, attend=Attend(tokens=1), loop=loop)

    def feed(self, count: int | None = None, *, ended: bool | None = None) -> None:
        """Give the next items; the last ones bring the end unless `ended` says otherwise."""
        stop = len(self.speech.text) if count is None else self.fed + count
        ids = self.speech.text[self.fed : stop]
        self.fed += len(ids)
        over = self.fed == len(self.speech.text) if ended is None else ended
        self.driver.engine.feed(JobKey(self.loop), ids, over)

    @property
    def ids(self) -> list[int]:
        return [int(self.driver.done[self.first].outputs["code0"]), *self.driver.ids.get(self.loop, [])]

    @property
    def frames(self) -> list[list[int]]:
        emitted = self.driver.emissions.get(self.loop, [])
        assert [item.iteration for item in emitted] == [*range(len(emitted))]
        return [item.outputs["frame"].tolist() for item in emitted]

    @property
    def result(self) -> tuple[list[int], list[list[int]]]:
        return self.ids, self.frames


def speak(
    engine: KVCacheEngine, speeches: Iterable[Speech], lookahead: int = 0
) -> list[tuple[list[int], list[list[int]]]]:
    """Ids and frames of several requests together, with all text there from the start."""
    driver = Driver(engine, lookahead)
    talks = [Talk(driver, handle, speech).open() for handle, speech in enumerate(speeches)]
    for talk in talks:
        talk.feed()
    driver.run()
    assert not driver.failed, driver.failed
    for talk in talks:
        engine.close(Handle(talk.handle))
    use = engine.memory()
    assert use.pages_used == use.slots_used == 0
    return [talk.result for talk in talks]
