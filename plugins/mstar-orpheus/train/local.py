"""A checkpoint that speaks in this process, by the modules that serve it, without an engine. Used by the judge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.plugin.model import ModelContext
from mstar_core.plugin.processor import PromptRequest
from mstar_orpheus.checkpoint.config import IDS_PER_FRAME, WINDOW_FRAMES, read_config
from mstar_orpheus.llama import Llama
from mstar_orpheus.model import Orpheus
from mstar_orpheus.plugin import ORPHEUS, Params
from mstar_orpheus.processor import PROMPT, Processor
from mstar_orpheus.vocoder.frames import codes_from_ids, levels_from_codes
from mstar_orpheus.vocoder.node import Vocoder

if TYPE_CHECKING:
    from torch import Tensor

LIMIT: Final = 1200


class Cache:
    """Keys and values of one sequence (a KVView)."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Return attention over all ids so far. query, key, value: [T, heads, head_dim]."""
        if layer in self._layers:
            before_key, before_value = self._layers[layer]
            key, value = torch.cat([before_key, key]), torch.cat([before_value, value])
        self._layers[layer] = (key, value)
        visible = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        groups = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(groups, dim=1).transpose(0, 1) for each in (key, value))
        mixed = scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=visible, scale=scale)
        return mixed.transpose(0, 1)


class LocalSpeaker:
    """Language model and vocoder of a checkpoint folder, float32 on the CPU."""

    def __init__(self, folder: Path, *, streams: bool) -> None:
        spec = ORPHEUS.bound(folder, {})
        model = Orpheus(ModelContext(spec=spec, folder=folder, device=torch.device("cpu"), dtype=torch.float32))
        llama, vocoder = (model.get_submodule(spec.node(name)) for name in ("LLM", "snac_decoder"))
        if not isinstance(llama, Llama) or not isinstance(vocoder, Vocoder):
            raise TypeError("orpheus has other nodes")
        self._llama, self.vocoder, self._streams = llama, vocoder, streams
        self._config, self._processor = read_config(folder), Processor(folder, {})

    @torch.inference_mode()
    def speak(self, text: str, voice: str, seed: int, sampling: Mapping[str, float]) -> np.ndarray:
        """Return the sound of a text, float32 [samples]. sampling: temperature and top_p."""
        return self._sound(self.ids(text, voice, seed, sampling))

    @torch.inference_mode()
    def ids(self, text: str, voice: str, seed: int, sampling: Mapping[str, float]) -> list[int]:
        """Return the audio ids of a text."""
        request = PromptRequest(text=text, params=Params(voice=voice))
        prompt = torch.from_numpy(self._processor.process_prompt(request).arrays[PROMPT])
        generator = torch.Generator().manual_seed(seed)
        ids, cache, tokens = list[int](), Cache(), prompt
        while len(ids) < LIMIT:
            first = len(prompt) + len(ids) - len(tokens)
            positions = torch.arange(first, first + len(tokens))
            hidden = self._llama(kv=cache, positions=positions, tokens=tokens)["hidden"]
            tokens = sampled(self._llama.head(hidden[-1:])[0].float(), sampling, generator)
            if int(tokens) == self._config.ids.stop:
                break
            if int(tokens) in self._config.audio_ids:
                ids.append(int(tokens))
        return ids

    def _sound(self, ids: list[int]) -> np.ndarray:
        config, frames = self._config, len(ids) // IDS_PER_FRAME
        if frames < WINDOW_FRAMES:
            return np.zeros(config.frame_samples, np.float32)
        whole = torch.tensor(ids[: frames * IDS_PER_FRAME])[None]
        snac, size = self.vocoder.snac, config.frame_samples
        if self._streams:
            whole = whole[0].unfold(0, WINDOW_FRAMES * IDS_PER_FRAME, IDS_PER_FRAME)
        levels = levels_from_codes(codes_from_ids(whole, config.ids.audio_offset, config.codebook_size))
        lengths = snac.config.noise_lengths(whole.shape[1] // IDS_PER_FRAME)
        noise = [torch.randn(len(whole), 1, length) for length in lengths]
        keep = (size, 2 * size) if self._streams else None
        samples: np.ndarray = snac.decode(levels, noise, keep).flatten().numpy()
        return samples


def sampled(logits: Tensor, sampling: Mapping[str, float], generator: torch.Generator) -> Tensor:
    """Return one id [1] by temperature and top-p. logits: float32 [vocabulary]."""
    chances, ids = (logits / sampling["temperature"]).softmax(0).sort(descending=True)
    kept = chances.cumsum(0) - chances < sampling["top_p"]
    return ids[torch.multinomial(chances * kept, 1, generator=generator)]
