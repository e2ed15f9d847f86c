"""A plain loop that drives the talker over the golden cases, without the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.plugin.model import ModelContext
from mstar_qwen3omni.checkpoint.config import OmniConfig
from mstar_qwen3omni.model import Qwen3Omni
from mstar_qwen3omni.params import VOICES
from mstar_qwen3omni.plugin import mstar_models
from mstar_qwen3omni.talker.talker import Talker

from ..golden_set import golden_folder, golden_settings

FOLDER = golden_folder()
CASES = sorted(path.stem.removeprefix("case_") for path in FOLDER.glob("case_*.safetensors"))
HAS_WEIGHTS = (FOLDER / "model.safetensors").is_file()
VOICE = str(golden_settings()["voice"])
"""Voice of the set's answers."""

SPECIAL_CODES = 1024
CPU = torch.device("cpu")
Choose = Callable[[Tensor, list[int]], int]
"""Called with logits of code 0 [vocab] and the codes before; returns the next one."""


class DenseCache:
    """A minimal KVView of several sequences. lengths: new tokens of each in the next forward."""

    def __init__(self, rows: int = 1) -> None:
        self._layers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.lengths = [1] * rows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        parts = zip(*(x.split(self.lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._one((layer, index), *part) for index, part in enumerate(parts)])

    def _one(self, at: tuple[int, int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if at in self._layers:
            before_key, before_value = self._layers[at]
            key, value = torch.cat([before_key, key]), torch.cat([before_value, value])
        self._layers[at] = (key, value)
        visible = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (key, value))
        return scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=visible).transpose(0, 1)


@dataclass(frozen=True)
class Case:
    """One request of the set, as the talker sees it."""

    name: str
    config: OmniConfig
    tensors: dict[str, Tensor]

    @property
    def ids(self) -> Tensor:
        """Ids of the prompt: the user's turns and nine placeholders of the answer's opening."""
        return self.tensors["talker_input_ids"]

    @property
    def is_media(self) -> Tensor:
        ids = self.config.ids
        return torch.isin(self.ids, torch.tensor([ids.image_pad, ids.video_pad, ids.audio_pad]))

    @property
    def positions(self) -> Tensor:
        return self.tensors["talker_position_ids"].float()

    @property
    def states(self) -> Tensor:
        """Hidden states of the media tokens, in the order of the prompt."""
        ids = self.config.ids
        pads = torch.tensor([ids.image_pad, ids.video_pad, ids.audio_pad])
        return self.tensors["thinker_accept_hidden"][torch.isin(self.tensors["in.input_ids"], pads)]

    @property
    def texts(self) -> list[int]:
        """Ids that the thinker sends: all but its last token, as the reference does with either kind of end."""
        return [int(tensor) for tensor in self.tensors["thinker_tokens"][:-1]]

    @property
    def start(self) -> list[int]:
        """Ids that precede the six vectors of the opening."""
        return [self.config.ids.im_start, self.config.ids.assistant, int(self.newline)]

    @property
    def newline(self) -> int:
        """The newline's id: the last of the prompt."""
        return int(self.tensors["in.input_ids"][-1])


@dataclass
class Spoken:
    """Everything that one run of the talker produced."""

    tokens: list[int] = field(default_factory=list)
    frames: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    prompt: Tensor = field(default_factory=lambda: torch.empty(0))


def greedy(config: OmniConfig, penalty: float = 1.05) -> Choose:
    """Return the engine's greedy draw of code 0: penalty over this answer's codes, then suppression (section 12)."""
    vocab, stop = config.talker.vocab, config.codec.eos

    def choose(logits: Tensor, before: list[int]) -> int:
        scores = logits.clone()
        for code in set(before):
            scores[code] = scores[code] / penalty if scores[code] > 0 else scores[code] * penalty
        keep = scores[stop].clone()
        scores[vocab - SPECIAL_CODES :] = -torch.inf
        scores[stop] = keep
        return int(scores.argmax())

    return choose


def open_turn(talker: Talker, case: Case, cache: DenseCache) -> list[Tensor]:
    """Run the prompt of one sequence up to the opening, cut into passes of text and of media. Returns hidden states."""
    ids = torch.cat([case.ids[:-9], torch.tensor(case.start)])
    media = torch.cat([case.is_media[:-9], torch.zeros(3, dtype=torch.bool)])
    positions, found, taken = case.positions[:, : len(ids)], [], 0
    cuts = [0, *(torch.nonzero(media[1:] != media[:-1]).flatten() + 1).tolist(), len(ids)]
    for first, last in itertools.pairwise(cuts):
        cache.lengths = [last - first]
        given = {"kv": cache, "positions": positions[:, first:last].contiguous()}
        if media[first]:
            states = case.states[taken : taken + last - first]
            taken += last - first
            found.append(talker(states=states[None], **given)["hidden"])
        else:
            found.append(talker(tokens=ids[first:last], **given)["hidden"])
    return found


def rules(rows: int, heat: float = 0.0, count: int = 50, mass: float = 0.8) -> dict[str, Tensor]:
    """Return the predictor's sampling parameters of a batch."""
    return {
        "code_predictor_temperature": torch.full((rows,), heat),
        "code_predictor_top_k": torch.full((rows,), count),
        "code_predictor_top_p": torch.full((rows,), mass),
    }


def speak(
    talker: Talker,
    case: Case,
    steps: int,
    *,
    voice: str = VOICE,
    seed: int | None = None,
    choose: Choose | None = None,
    randoms: Callable[[int], Tensor] | None = None,
) -> Spoken:
    """Run one request alone: prompt, opening, and decode until the end token or `steps` codes of group 0.

    seed: of the numbers that sample residual codes; None is greedy. randoms: gives these numbers instead,
    [1, groups - 1], for a count of codes of group 0.
    """
    cache, out, config = DenseCache(), Spoken(), case.config
    draw = choose or greedy(config)
    generator = torch.Generator().manual_seed(seed or 0)
    numbers = randoms or (lambda _: torch.rand(1, config.groups - 1, generator=generator))
    heard = open_turn(talker, case, cache)
    cache.lengths = [6]
    made = talker(
        kv=cache,
        positions=case.positions[:, -6:].contiguous(),
        text=torch.tensor(case.texts[:1]),
        voice=torch.tensor([VOICES.index(voice)]),
    )
    out.prompt = torch.cat([*heard, made["hidden"]])
    position, texts = float(case.positions.max()), case.texts[1:]
    cache.lengths = [1]
    while True:
        out.hidden.append(made["last_hidden"][0])
        out.logits.append(talker.head(made["last_hidden"])[0])
        out.tokens.append(draw(out.logits[-1], out.tokens))
        if out.tokens[-1] == config.codec.eos or len(out.tokens) == steps:
            return out
        position += 1
        made = talker(
            kv=cache,
            positions=torch.tensor([position]),
            code0=torch.tensor(out.tokens[-1:]),
            text=torch.tensor([texts.pop(0) if texts else -1]),
            last_hidden=made["last_hidden"],
            text_ended=made["text_ended"],
            random=numbers(len(out.tokens)),
            **rules(1, 0.0 if seed is None else 1.0),
        )
        out.frames.append(made["frame"][0])


def load_talker(folder: Path, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Talker:
    (spec,) = mstar_models()
    model = Qwen3Omni(ModelContext(spec=spec, folder=folder, device=device, dtype=dtype))
    talker = model.get_submodule(spec.node("Talker"))
    assert isinstance(talker, Talker)
    return talker


def read_case(name: str, config: OmniConfig) -> Case:
    return Case(name, config, load_file(FOLDER / f"case_{name}.safetensors"))
