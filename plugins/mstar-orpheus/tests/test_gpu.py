"""The golden vectors on CUDA: float32 gives the reference's ids, bfloat16 stays within its rounding error."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.device import prepare_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.graph import from_param
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.plugin.model import ModelContext
from mstar_orpheus.model import Orpheus
from mstar_orpheus.vocoder.frames import codes_from_ids, levels_from_codes

pytestmark = pytest.mark.gpu

NO_GRAPHS = CaptureSizes()
LOGITS_FLOAT32, WAVEFORM_FLOAT32 = 2e-4, 2e-4
FLOAT32 = 2e-6
"""Largest relative error, by norms, in float32."""
LOGITS_BFLOAT16 = 0.03
"""Largest relative error, by norms, over a whole prompt."""


def node(reference: Any, name: str, dtype: torch.dtype) -> Any:
    context = ModelContext(spec=reference.spec, folder=reference.folder, device=torch.device("cuda", 0), dtype=dtype)
    return Orpheus(context).get_submodule(reference.spec.node(name))


def engine_of(reference: Any, dtype: torch.dtype, graphs: CaptureSizes = NO_GRAPHS, **changes: Any) -> KVCacheEngine:
    sizes = {"num_pages": 256, "page_size": 8, "max_slots": 8, "max_seq_len": 512, "token_budget": 64} | changes
    module = node(reference, "LLM", dtype)
    settings = KVSettings(
        device=torch.device("cuda", 0),
        dtype=dtype,
        attention="torch",
        vocab=module.model.embed_tokens.num_embeddings,
        lookahead=1,
        prefix_cache=False,
        graphs=graphs,
        **sizes,
    )
    return KVCacheEngine(reference.spec.node("LLM"), module, settings)


def greedy(engine: KVCacheEngine, prompts: list[Tensor], steps: int, penalty: float) -> list[list[int]]:
    keys, ids = itertools.count(1), {handle: list[int]() for handle in range(len(prompts))}
    owner: dict[int, int] = {}
    for handle, prompt in enumerate(prompts):
        engine.open(Handle(handle), SamplingParams(repetition_penalty=penalty), len(prompt) + steps)
        first, second = JobKey(next(keys)), JobKey(next(keys))
        owner[first] = owner[second] = handle
        engine.submit(Job(key=first, handle=Handle(handle), inputs={"tokens": prompt}, outputs=("token",)))
        loop = LoopSpec(max_iters=steps - 1, carry={"token": "token"}, stop_port="token")
        engine.submit(Job(key=second, handle=Handle(handle), loop=loop, outputs=("token",)))
    flight: list[Any] = []
    while True:
        launched = engine.launch()
        flight += [launched] if launched is not None else []
        if not flight:
            return [ids[handle] for handle in range(len(prompts))]
        if len(flight) > 1 or launched is None:
            result = engine.collect(flight.pop(0))
            assert not result.failed
            for done in result.done:
                if done.job.loop is None:
                    ids[owner[done.job.key]].append(int(done.outputs["token"]))
            if result.loop is not None:
                for key, value in zip(result.loop.keys.tolist(), result.loop.ids.tolist(), strict=True):
                    ids[owner[key]].append(value)


@pytest.mark.parametrize("graphs", [CaptureSizes(), CaptureSizes(decode=(1, 8))], ids=["eager", "captured"])
@pytest.mark.parametrize("is_penalized", [False, True], ids=["plain", "penalized"])
def test_float32_gives_the_reference_ids(graphs: CaptureSizes, is_penalized: bool, golden: Any, reference: Any) -> None:
    prompts = [golden.lm[f"prompt_{index}"] for index in golden.prompts]
    name, penalty = ("greedy_penalised_tokens", golden.penalty) if is_penalized else ("greedy_tokens", 1.0)
    expected = [golden.lm[f"{name}_{index}"].tolist() for index in golden.prompts]
    assert greedy(engine_of(reference, torch.float32, graphs=graphs), prompts, len(expected[0]), penalty) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_prefill_logits(prompt: int, dtype: torch.dtype, golden: Any, reference: Any) -> None:
    ids = golden.lm[f"prompt_{prompt}"]
    engine = engine_of(reference, dtype, token_budget=max(64, len(ids)))
    engine.open(Handle(1), SamplingParams(), len(ids) + 1)
    job = Job(key=JobKey(1), handle=Handle(1), inputs={"tokens": ids}, outputs=("logits",))
    engine.submit(job)
    running = engine.launch()
    assert running is not None
    actual = engine.collect(running).done[0].outputs["logits"].float().cpu()
    expected = golden.lm[f"prefill_logits_{prompt}"]
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, atol=LOGITS_FLOAT32, rtol=0)
    assert (actual - expected).norm() / expected.norm() < LOGITS_BFLOAT16


def test_waveform_equals_the_reference(sequence: int, golden: Any, reference: Any) -> None:
    vocoder = node(reference, "snac_decoder", torch.float32)
    prepare_device(torch.device("cuda", 0))
    codes = [golden.snac[f"codes_{sequence}_level{level}"].cuda() for level in range(3)]
    actual = vocoder.snac.decode(codes).cpu()
    torch.testing.assert_close(actual, golden.snac[f"waveform_{sequence}"], atol=WAVEFORM_FLOAT32, rtol=0)


def test_the_middle_of_a_window_equals_the_cpu(reference: Any) -> None:
    prepare_device(torch.device("cuda", 0))
    vocoder, plain = node(reference, "snac_decoder", torch.float32), reference.vocoder
    size, offset = plain.snac.config.frame_samples, plain.audio_offset
    slots = torch.arange(28) % 7 * plain.snac.config.codebook_size
    window = offset + slots + torch.randint(0, plain.snac.config.codebook_size, (5, 28))
    noise = [torch.randn(5, 1, length) for length in plain.snac.config.noise_lengths(4)]
    whole = plain.decode(window, noise)
    actual = vocoder.decode(window.cuda(), [value.cuda() for value in noise], (size, 2 * size)).cpu()
    torch.testing.assert_close(actual, whole[:, size : 2 * size], atol=WAVEFORM_FLOAT32, rtol=0)


def some_windows(built: Any, rows: int, frames: int) -> tuple[Tensor, dict[str, Tensor]]:
    book, ids = built.vocoder.snac.config.codebook_size, frames * 7
    window = built.vocoder.audio_offset + torch.arange(ids) % 7 * book + torch.randint(0, book, (rows, ids))
    inputs = {"step": torch.arange(rows), "seed": torch.arange(rows) * 7, "noise": torch.ones(rows, dtype=torch.int64)}
    return window, inputs | {name: torch.zeros(rows, dtype=torch.bool) for name in ("first", "last", "flush")}


PCM = 8
"""Largest difference of samples between two float32 decoders, of 32767."""


@pytest.mark.parametrize(("rows", "frames"), [(1, 4), (5, 4), (40, 4), (70, 4), (3, 2), (3, 3)])
def test_captured_windows_equal_the_cpu(rows: int, frames: int, reference: Any) -> None:
    prepare_device(torch.device("cuda", 0))
    vocoder = node(reference, "snac_decoder", torch.float32)
    vocoder.warm_up()
    window, inputs = some_windows(reference, rows, frames)
    expected = reference.vocoder(window=window, **inputs)["pcm"].int()
    for _ in range(2):
        assert (vocoder(window=window, **inputs)["pcm"].cpu().int() - expected).abs().max() <= PCM
    while vocoder.idle():
        pass
    assert (vocoder(window=window, **inputs)["pcm"].cpu().int() - expected).abs().max() <= PCM


def test_a_batch_of_plain_and_flushed_rows_equals_the_cpu(reference: Any) -> None:
    prepare_device(torch.device("cuda", 0))
    vocoder = node(reference, "snac_decoder", torch.float32)
    window, inputs = some_windows(reference, 4, 4)
    inputs["flush"] = torch.tensor([False, True, True, True])
    inputs["first"] = torch.tensor([True, True, False, False])
    inputs["last"] = torch.tensor([False, False, False, True])
    inputs["noise"] = torch.tensor([1, 1, 0, 1])
    expected = reference.vocoder(window=window, **inputs)["pcm"]
    actual = vocoder(window=window, **inputs)["pcm"]
    assert [len(row) for row in actual] == [len(row) for row in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine.cpu().int() - theirs.int()).abs().max() <= PCM


def test_the_kernels_are_as_exact_as_float32(reference: Any) -> None:
    prepare_device(torch.device("cuda", 0))
    vocoder, plain = node(reference, "snac_decoder", torch.float32), reference.vocoder
    window, _ = some_windows(reference, 6, 4)
    noise = [torch.randn(6, 1, length) for length in plain.snac.config.noise_lengths(4)]
    exact = copy.deepcopy(plain.snac).double()
    levels = levels_from_codes(codes_from_ids(window, plain.audio_offset, plain.snac.config.codebook_size))
    expected = exact.decode(levels, [each.double() for each in noise]).squeeze(1)
    actual = vocoder.decode(window.cuda(), [each.cuda() for each in noise]).cpu().double()
    assert (actual - expected).norm() / expected.norm() < FLOAT32
    assert torch.isfinite(actual).all()


def test_windows_of_strangers_through_the_engine_equal_the_cpu(reference: Any) -> None:
    device = torch.device("cuda", 0)
    prepare_device(device)
    vocoder = node(reference, "snac_decoder", torch.float32)
    vocoder.warm_up()
    spec = reference.spec.node("snac_decoder")
    engine = StatelessEngine(spec, vocoder, device=device, dtype=torch.float32, max_batch=64, lookahead=1)
    words = {"$step": "step", "$first": "first", "$last": "last"}
    words |= {from_param(name): name for name in ("flush", "noise", "seed")}
    window, inputs = some_windows(reference, 24, 4)
    expected = reference.vocoder(window=window, **inputs)["pcm"].int()
    flight: list[Any] = []
    actual: dict[int, Tensor] = {}
    for start in range(0, 24, 8):
        for row in range(start, start + 8):
            engine.open(Handle(row), SamplingParams(), 1)
            numbers = {name: inputs[word][row].item() for name, word in words.items()}
            job = Job(key=JobKey(row), handle=Handle(row), inputs={"window": window[row]}, outputs=("pcm",))
            job.numbers = numbers
            engine.submit(job)
        flight.append(engine.launch())
        if len(flight) > 1:
            actual |= {done.job.key: done.outputs["pcm"].clone() for done in engine.collect(flight.pop(0)).done}
    actual |= {done.job.key: done.outputs["pcm"].clone() for done in engine.collect(flight.pop(0)).done}
    assert len(actual) == 24
    for row, pcm in actual.items():
        assert (pcm.int() - expected[row]).abs().max() <= PCM
