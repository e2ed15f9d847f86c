"""Code2Wav against the reference: whole, in pieces, in batches, in the engine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.engine.warmup import run_warmup
from mstar_core.errors import EngineError
from mstar_core.graph import STATELESS, STEP, LeftContext, NodeSpec, Stream, from_param
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.worker.state.stream_inbox import StreamInbox
from mstar_qwen3omni.graph import build
from mstar_qwen3omni.vocoder.code2wav import to_pcm16
from mstar_qwen3omni.vocoder.decoder import upsampled
from mstar_qwen3omni.vocoder.windows import USUAL, Chunking, fresh_samples

from .encoder_cases import SMALL, needs_weights, reference, small, vectors
from .golden_set import golden_settings

WAVE = 1e-4
"""Tolerance of the set for samples."""

CODES = NodeSpec(name="codes", engine=STATELESS, ports={"codes": "i64[n,1]", "pcm": "i16[s]"})

STEP_PCM = 4
"""The same in steps of 16 bits."""


def test_the_first_pieces_of_a_stream_have_the_documented_lengths() -> None:
    lengths = [USUAL.length(step) for step in range(4)]
    spans = [fresh_samples(USUAL, step, count, frame=1920, lost=555) for step, count in enumerate(lengths)]
    assert lengths == [8, 33, 50, 50]
    assert [span.stop - span.start for span in spans] == [8 * 1920 - 555, 48_000, 48_000, 48_000]


@pytest.mark.parametrize(
    "streams",
    [
        USUAL,
        Chunking(first=1, chunk=3, left=1),
        Chunking(first=9, chunk=4, left=20),
        Chunking(first=2, chunk=9, left=4),
    ],
)
@pytest.mark.parametrize("total", [1, 7, 8, 9, 61])
def test_pieces_are_continuous_to_the_end(streams: Chunking, total: int) -> None:
    end, place = 0, 0
    for step in itertools.count():
        begun = streams.start(step)
        if begun >= total:
            break
        frames = min(total, begun + streams.length(step) - streams.context(step)) - begun + streams.context(step)
        span = fresh_samples(streams, step, frames, frame=1920, lost=555)
        place = 1920 * (begun - streams.context(step))
        assert place + span.start == end
        end = place + span.stop
    assert end == 1920 * total - 555


def test_windows_are_those_of_the_stream() -> None:
    for first, chunk, left in ((8, 25, 25), (9, 4, 20), (2, 9, 4)):
        stream, policy = Chunking(first=first, chunk=chunk, left=left), LeftContext(chunk, left, first=first)
        policy, step = policy.for_request({}), 0
        inbox = StreamInbox(Stream("codes", into=(CODES, "codes"), chunk=policy), policy, flush=False)
        for frame in range(60):
            inbox.put_tensor(frame, torch.tensor([frame]))
            while (popped := inbox.pop()) is not None:
                assert (popped[0].start, len(popped[1])) == (
                    stream.start(step) - stream.context(step),
                    stream.length(step),
                )
                step += 1
        assert step > 2


def test_without_left_context_every_piece_lacks_its_last_samples() -> None:
    span = fresh_samples(Chunking(first=5, chunk=5, left=0), 3, 5, frame=1920, lost=555)
    assert span == slice(0, 5 * 1920 - 555)


def test_a_window_shorter_than_the_lost_samples_returns_none() -> None:
    assert fresh_samples(Chunking(first=1, chunk=1, left=1), 0, 1, frame=10, lost=32) == slice(0, 0)


def pieces(module: Any, codes: Tensor, stream: Chunking) -> list[Tensor]:
    """Decode a stream window by window. codes: [T, groups]."""
    found = []
    for step in itertools.count():
        begun, context = stream.start(step), stream.context(step)
        if begun >= len(codes):
            return found
        window = codes[begun - context : begun - context + stream.length(step)]
        found.append(run(module, [(window, step, stream)])[0])


def run(module: Any, rows: list[tuple[Tensor, int, Chunking]]) -> list[Tensor]:
    """Call the node with rows of (codes [n, groups], step, stream)."""
    codes = [row for row, _, _ in rows]
    is_even = len({code.shape for code in codes}) == 1
    numbers = np.array([(step, stream.first, stream.chunk, stream.left) for _, step, stream in rows]).T
    made = module(
        codes=torch.stack(codes) if is_even else codes,
        step=numbers[0],
        codec_first_frames=numbers[1],
        codec_chunk_frames=numbers[2],
        codec_left_context_frames=numbers[3],
    )["pcm"]
    return list(made)


@needs_weights
def test_intermediate_tensors_equal_the_reference() -> None:
    golden, module = vectors("code2wav"), reference("Code2Wav")
    mean = module.embed(golden["in.codes"].T[None])
    hidden = module.pre_transformer(mean)
    torch.testing.assert_close(mean[0], golden["code_embedding_mean"], atol=1e-5, rtol=0)
    torch.testing.assert_close(hidden[0], golden["pre_transformer_out"], atol=1e-4, rtol=0)
    torch.testing.assert_close(upsampled(module.upsample, hidden)[0].T, golden["upsample_out"], atol=1e-3, rtol=0)


@needs_weights
def test_one_call_equals_the_reference() -> None:
    golden, module = vectors("code2wav"), reference("Code2Wav")
    for codes, wave in (("in.codes", "waveform_whole"), ("in.codes_long", "waveform_long_whole")):
        actual = module.decode(golden[codes].T[None])[0]
        torch.testing.assert_close(actual, golden[wave], atol=WAVE, rtol=0)


def chunked(module: Any, codes: Tensor, chunk: int, left: int) -> Tensor:
    """The reference's chunked decode, which loses samples at each border. codes: [T, groups]."""
    parts = []
    for start in range(0, len(codes), chunk):
        context = min(left, start)
        made = module.decode(codes[None, start - context : start + chunk])[0]
        parts.append(made[context * module.sizes.frame_samples :])
    return torch.cat(parts)


@needs_weights
def test_the_reference_variant_with_cut_borders_equals_the_reference() -> None:
    golden, module = vectors("code2wav"), reference("Code2Wav")
    actual = chunked(module, golden["in.codes"].T, *windows())
    torch.testing.assert_close(actual, golden["waveform_chunked"], atol=WAVE, rtol=0)
    actual = chunked(module, golden["in.codes_long"].T, *long_windows())
    torch.testing.assert_close(actual, golden[long_name()], atol=WAVE, rtol=0)


def windows() -> tuple[int, int]:
    """Return frames and left context of the windows of the set's chunked waveform."""
    settings = golden_settings()
    return settings["code2wav_chunk"], settings["code2wav_left"]


def long_name() -> str:
    """Return the name of the tensor of long chunks, which ends in their frames and left context."""
    return next(name for name in vectors("code2wav") if name.startswith("waveform_long_chunked_"))


def long_windows() -> tuple[int, int]:
    """Return frames and left context of the long chunks: those of the reference, which whole answers use too."""
    chunk, left = long_name().rsplit("_", 2)[1:]
    return int(chunk), int(left)


@needs_weights
def test_streamed_pieces_equal_the_gapless_reference() -> None:
    golden, module = vectors("code2wav"), reference("Code2Wav")
    chunk, left = windows()
    actual = pieces(module, golden["in.codes"].T, Chunking(first=chunk, chunk=chunk, left=left))
    together = torch.cat(actual)
    assert together.dtype == torch.int16 and len(actual) == -(-golden["in.codes"].shape[1] // chunk)
    expected = to_pcm16(golden["waveform_gapless"])
    assert together.shape == expected.shape and (together.int() - expected.int()).abs().max() <= STEP_PCM


@needs_weights
@pytest.mark.parametrize("name", ["text", "audio"])
def test_codes_of_a_case_give_its_waveform(name: str) -> None:
    golden, module = vectors(f"case_{name}"), reference("Code2Wav")
    actual = chunked(module, golden["codes"].T, *long_windows())
    torch.testing.assert_close(actual, golden["waveform"], atol=WAVE, rtol=0)


def codes_of(frames: int, seed: int = 1) -> Tensor:
    sizes = SMALL.vocoder
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, sizes.codebook, (frames, sizes.groups), generator=made)


def test_a_stream_with_enough_context_equals_one_call() -> None:
    module, codes = small("Code2Wav"), codes_of(41)
    expected = to_pcm16(module.decode(codes[None])[0])
    actual = torch.cat(pieces(module, codes, Chunking(first=3, chunk=6, left=35)))
    assert actual.shape == expected.shape and (actual.int() - expected.int()).abs().max() <= STEP_PCM


def test_rows_of_any_batch_equal_rows_alone() -> None:
    module, short = small("Code2Wav"), Chunking(first=4, chunk=2, left=3)
    rows = [(codes_of(8, 1), 0, USUAL), (codes_of(5, 2), 2, short), (codes_of(33, 3), 1, USUAL)]
    rows += [(codes_of(8, 4), 0, USUAL), (codes_of(8, 5), 3, replace(short, chunk=5))]
    together = run(module, rows)
    assert all(torch.equal(run(module, [row])[0], own) for row, own in zip(rows, together, strict=True))
    even = [(codes_of(8, seed), 0, USUAL) for seed in range(3)]
    assert all(torch.equal(run(module, [row])[0], own) for row, own in zip(even, run(module, even), strict=True))


def test_samples_stay_within_their_range() -> None:
    module = small("Code2Wav")
    module.decoder[-1].conv.weight.mul_(100)
    actual = module.decode(codes_of(9)[None])
    assert actual.abs().max() == 1.0 and to_pcm16(actual).abs().max() == 32767


def test_an_id_that_is_not_a_code_is_an_error() -> None:
    codes = codes_of(8)
    codes[3, 1] = SMALL.vocoder.codebook
    with pytest.raises(EngineError, match="not a code"):
        run(small("Code2Wav"), [(codes, 0, USUAL)])


def test_the_short_end_of_a_stream_runs_in_a_longer_window() -> None:
    module, codes = small("Code2Wav"), codes_of(37)
    stream = Chunking(first=3, chunk=6, left=4)
    expected = pieces(module, codes, stream)
    module.capture(GraphCache(torch.device("cpu")))
    for _ in range(2):
        actual = pieces(module, codes, stream)
        assert all(torch.equal(own, each) for own, each in zip(actual, expected, strict=True))
        while module.idle():
            pass
    assert module.counters()["graph_hits"] == len(expected)


def test_windows_run_in_the_engine() -> None:
    module, sizes = small("Code2Wav"), SMALL.vocoder
    names = ("codec_first_frames", "codec_chunk_frames", "codec_left_context_frames")
    spec = NodeSpec(
        name="Code2Wav",
        engine=STATELESS,
        batch_key=("codes",),
        ports={"codes": f"i64[n,{sizes.groups}]", "pcm": "i16[s]", **dict.fromkeys(names, "i64")},
    )
    engine = StatelessEngine(spec, module, device=torch.device("cpu"), dtype=torch.float32)
    numbers = dict(zip(map(from_param, names), (USUAL.first, USUAL.chunk, USUAL.left), strict=True))
    for row in range(3):
        engine.open(Handle(row), SamplingParams(), 1)
        job = Job(key=JobKey(row), handle=Handle(row), inputs={"codes": codes_of(8, row)}, outputs=("pcm",))
        job.numbers = {**numbers, STEP: 0}
        engine.submit(job)
    running = engine.launch()
    assert running is not None
    result = engine.collect(running)
    assert not result.failed and result.rows == 3
    for done in result.done:
        assert torch.equal(done.outputs["pcm"], run(module, [(codes_of(8, int(done.job.handle)), 0, USUAL)])[0])


@pytest.mark.parametrize("node", ["Code2Wav", "audio_encoder", "vision_encoder"])
def test_warm_up_requests_run_in_the_engine_and_teach_its_graphs(node: str) -> None:
    module, spec = small(node), next(each for each in build(SMALL).nodes if each.name == node)
    module.capture(GraphCache(torch.device("cpu")))
    engine = StatelessEngine(spec, module, device=torch.device("cpu"), dtype=torch.float32)
    run_warmup(engine, module.warmup_requests(), lambda title: None)
    counters = module.counters()
    assert counters["graphs_captured"] > 2 and not module.idle()


def test_the_warm_up_runs_the_first_windows_of_a_stream() -> None:
    module = small("Code2Wav")
    (request,) = module.warmup_requests()
    assert [step.inputs["codes"].shape[0] for step in request.steps] == [8, 33, 50] and request.is_value_free
