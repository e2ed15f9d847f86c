"""Work that the end of speech leaves in a spoken conversation, by counters: tokens, forward passes, encoded windows.

Run from the repository root: `python -m bench.turn_work [--model tiny|mini] [--turns 4]`. A conversation with an image
in its first turn and a sound of 2.75 attention windows in each later one runs in this process. Per turn, from the end
of its sound to its first id: tokens that the thinker computes, its forward passes, and windows that the audio encoder
encodes. `ahead`: with the requests that `/v1/realtime` makes while the sound grows; `at once`: without them.
"""

from __future__ import annotations

import argparse
import io
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import soundfile
from PIL import Image

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.miniature import Miniature
from mstar_core.conformance.nodes import RuntimeSettings, build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.processor import MediaPart
from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.checkpoint.shipped import FOLDER
from mstar_qwen3omni.plugin import spec

WINDOWS: Final = 2.75
"""Length of each sound in attention windows."""

RATE: Final = 16_000
MARGIN_S: Final = 0.05
"""As `/v1/realtime` sends it behind the last completed window."""

PARAMS: Final = {"max_output_tokens": 8, "talker_max_tokens": 10, "temperature": 0.0}


class Counted:
    """A deployment of one model in this process. counts: work since they were cleared."""

    def __init__(self, name: str) -> None:
        self.counts: Counter[str] = Counter()
        settings = RuntimeSettings(max_seq_len=2048)
        if name == "tiny":
            self.miniature = Miniature(spec(OmniConfig()))  # owns the checkpoint
            self.runtime, folder, built = self.miniature.runtime(settings), self.miniature.folder, self.miniature.built
        else:
            folder, found = FOLDER, spec(read_config(FOLDER))
            model = found.bound(folder, found.model_kwargs)
            built = build_nodes(model, folder)
            self.runtime = LocalRuntime(model, folder, settings, built=built)
        self.runtime.api.session = "talk"
        self.window_s = read_config(folder).audio.window / 100
        self._count_steps()
        self._count_windows(built["audio_encoder"].module)

    def _count_steps(self) -> None:
        thinker: Any = next(w.runners["Thinker"] for w in self.runtime.workers if "Thinker" in w.runners)
        collect = thinker.collect

        def counted(step: Any) -> Any:
            result = collect(step)
            self.counts += Counter(tokens=result.tokens, passes=int(result.tokens > 0))
            return result

        thinker.collect = counted

    def _count_windows(self, encoder: Any) -> None:
        batch = encoder._batch

        def counted(features: list[Any], **options: Any) -> Any:
            self.counts["windows"] += sum(math.ceil(len(each) / encoder.sizes.window) for each in features)
            return batch(features, **options)

        encoder._batch = counted


@dataclass
class Talk:
    """A conversation on one deployment."""

    served: Counted
    media: list[MediaPart] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def heard(self, part: MediaPart) -> Talk:
        """Return the conversation with a turn of the user behind it."""
        number = sum(each.modality == part.modality for each in self.media)
        turn = Turn(role="user", order=[(part.modality, number)])
        return replace(self, media=[*self.media, part], turns=[*self.turns, turn])

    def ask(self, *, reads_only: bool = False) -> list[int]:
        """Run a request and return the ids of its answer, whose own tokens and passes are not counted."""
        served = self.served
        served.counts.clear()
        served.runtime.api.reads_only = reads_only
        order = [place for turn in self.turns for place in turn.order]
        ask = SampleRequest(
            media=self.media,
            turns=self.turns,
            order=order,
            params=PARAMS,
            outputs=("text", "audio"),
            reads_windows=True,
            is_journaled=True,
        )
        call = served.runtime.send(ask)
        served.runtime.run()
        assert call.outcome is not None and call.outcome.status == "finished"
        ids = [int(value) for values in call.outcome.of("token") for value in values.reshape(-1)]
        served.counts -= Counter(tokens=max(0, len(ids) - 1), passes=max(0, len(ids) - 1))
        return ids


def picture() -> MediaPart:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 96, 3), dtype=np.uint8)).save(file, "PNG")
    return MediaPart(modality="image", data=file.getvalue())


def noise(seconds: float, seed: int) -> np.ndarray:
    """Return noise that is loudest at its begin: int16 [s]."""
    values = np.random.default_rng(seed).standard_normal(int(seconds * RATE))
    values[: RATE // 10] *= 8
    return (values * 800).clip(-32768, 32767).astype(np.int16)


def wav(samples: np.ndarray) -> MediaPart:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    return MediaPart(modality="audio", data=file.getvalue())


def run(model: str, turns: int, *, ahead: bool) -> None:
    """Print the work of each turn behind the first."""
    served = Counted(model)
    talk = Talk(served).heard(picture())
    talk = replace(talk, turns=[*talk.turns, Turn(role="assistant", ids=talk.ask())])
    for number in range(2, turns + 1):
        sound = noise(WINDOWS * served.window_s, number)
        for windows in range(1, int(WINDOWS) + 1) if ahead else ():
            talk.heard(wav(sound[: int((windows * served.window_s + MARGIN_S) * RATE)])).ask(reads_only=True)
        talk = talk.heard(wav(sound))
        ids = talk.ask()
        work = ", ".join(f"{served.counts[name]} {name}" for name in ("tokens", "passes", "windows"))
        print(f"{model} {'ahead' if ahead else 'at once'}, turn {number}: {work}")
        talk = replace(talk, turns=[*talk.turns, Turn(role="assistant", ids=ids)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "mini"), default="tiny")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    for ahead in (False, True):
        run(options.model, options.turns, ahead=ahead)


if __name__ == "__main__":
    main()
