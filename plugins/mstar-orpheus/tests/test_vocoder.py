"""The vocoder node: streamed windows, flush, noise per request, batches of several requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.graph import ChunkCursor, from_param
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_orpheus.checkpoint.config import EARLY_FRAMES, IDS_PER_FRAME, NOISE_MODES, WINDOW_FRAMES
from mstar_orpheus.vocoder.node import to_pcm16
from mstar_orpheus.vocoder.noise import window_noise

CHUNK, INT16 = 5e-5, 2
WINDOW = WINDOW_FRAMES * IDS_PER_FRAME


def row_inputs(count: int, **given: Any) -> dict[str, Tensor]:
    """Return the node's inputs besides the ids, one value per row."""
    default = {"step": 0, "first": False, "last": False, "flush": False, "noise": NOISE_MODES.index("off"), "seed": 0}
    return {name: torch.as_tensor(given.get(name, value)).expand(count).clone() for name, value in default.items()}


def windows(ids: Tensor) -> Tensor:
    return ids.unfold(0, WINDOW, IDS_PER_FRAME)


def accepted(raw: Tensor, built: Any) -> Tensor:
    """Return the ids that the stream of the bound spec accepts."""
    accept = built.spec.streams[0].accept
    return raw[(raw >= accept.start) & (raw < accept.stop)]


@pytest.mark.parametrize("source", ["audio_ids", "raw_stream"])
def test_streamed_chunks_equal_the_reference(sequence: int, source: str, golden: Any, reference: Any) -> None:
    batch = windows(accepted(golden.snac[f"{source}_{sequence}"], reference))
    samples = reference.vocoder.decode(batch, None)
    per_frame = golden.frame_samples
    floats, ints = golden.snac[f"stream_chunks_{sequence}"], golden.snac[f"stream_chunks_int16_{sequence}"]
    torch.testing.assert_close(samples[:, per_frame : 2 * per_frame], floats, atol=CHUNK, rtol=0)
    pcm = reference.vocoder(window=batch, **row_inputs(len(batch)))["pcm"]
    assert pcm.dtype == torch.int16
    assert int((pcm.int() - ints.int()).abs().max()) <= INT16


def test_the_stop_id_never_enters_a_window(golden: Any, reference: Any) -> None:
    raw = golden.snac["raw_stream_0"]
    stop = golden.json("config.json")["stop_token_id"]
    assert stop in raw
    kept = accepted(raw, reference)
    whole = len(golden.snac["audio_ids_0"])
    assert torch.equal(kept[:whole], golden.snac["audio_ids_0"])
    assert stop not in kept


def test_samples_are_clipped_and_truncated_toward_zero() -> None:
    samples = torch.tensor([1.5, -1.5, 0.99999, -0.99999, 1.4 / 32767, -1.6 / 32767, 0.0])
    assert to_pcm16(samples).tolist() == [32767, -32767, 32766, -32766, 1, -1, 0]


def test_one_batch_serves_requests_with_different_noise_as_if_alone(golden: Any, reference: Any) -> None:
    batch = torch.cat([windows(golden.snac[f"audio_ids_{index}"]) for index in golden.sequences])
    count = len(batch)
    rows = row_inputs(count, step=torch.arange(count), seed=torch.arange(count) * 7)
    rows["noise"] = torch.tensor([index % 2 for index in range(count)])
    together = reference.vocoder(window=batch, **rows)["pcm"]
    for row in range(count):
        one = {name: value[row : row + 1] for name, value in rows.items()}
        assert torch.equal(reference.vocoder(window=batch[row : row + 1], **one)["pcm"][0], together[row])


def test_seeded_noise_depends_on_seed_and_window_alone(golden: Any, reference: Any) -> None:
    window = windows(golden.snac["audio_ids_0"])[:1]

    def pcm(seed: int, step: int) -> bytes:
        rows = row_inputs(1, seed=seed, step=step, noise=NOISE_MODES.index("seeded"))
        return bytes(reference.vocoder(window=window, **rows)["pcm"].numpy())

    assert pcm(1, 0) == pcm(1, 0)
    assert len({pcm(1, 0), pcm(2, 0), pcm(1, 1)}) == 3


def test_noise_blocks_are_normal_and_unlike_each_other() -> None:
    modes = torch.full((2,), NOISE_MODES.index("seeded"))
    seeds, steps = torch.tensor([5, 2**62]), torch.tensor([0, 9])
    blocks = window_noise(modes, seeds, steps, [40_000] * 4)
    flat = torch.cat([block.reshape(2, -1) for block in blocks])
    assert torch.allclose(flat.mean(1), torch.zeros(8), atol=0.03)
    assert torch.allclose(flat.std(1), torch.ones(8), atol=0.03)
    assert float((torch.corrcoef(flat) - torch.eye(8)).abs().max()) < 0.03


def test_noise_off_is_zero_and_global_noise_is_drawn_anew() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    off = window_noise(zero + NOISE_MODES.index("off"), zero, zero, [64])[0]
    shared = [window_noise(zero + NOISE_MODES.index("global"), zero, zero, [64])[0] for _ in range(2)]
    assert not off.any()
    assert not torch.equal(*shared)


def frames_of(pcm: Any, per_frame: int) -> list[bytes]:
    rows = pcm if isinstance(pcm, list) else list(pcm)
    return [bytes(frame.numpy()) for row in rows for frame in row.split(per_frame)]


def test_flush_sends_every_frame_once_and_the_same_chunks_in_the_middle(golden: Any, reference: Any) -> None:
    ids = golden.ids(WINDOW_FRAMES + 1)
    per_frame = golden.frame_samples
    batch = windows(ids)
    batch = torch.cat([batch, batch[-1:]])  # the stream repeats the last window with the flag `last`
    count = len(batch)
    seeded = {"noise": NOISE_MODES.index("seeded"), "seed": 3, "step": torch.arange(count)}
    plain = reference.vocoder(window=batch[:-1], **row_inputs(count - 1, **seeded | {"step": torch.arange(count - 1)}))
    first, last = torch.arange(count) == 0, torch.arange(count) == count - 1
    flushed = reference.vocoder(window=batch, **row_inputs(count, flush=True, first=first, last=last, **seeded))["pcm"]
    assert [len(row) // per_frame for row in flushed] == [2, *[1] * (count - 2), 2]
    frames = frames_of(flushed, per_frame)
    assert len(frames) == len(ids) // IDS_PER_FRAME
    assert frames[1:-2] == frames_of(plain["pcm"], per_frame)


def test_flush_joins_the_last_frames_with_the_noise_of_their_window(golden: Any, reference: Any) -> None:
    window = windows(golden.snac["audio_ids_0"])[:1]
    noise = {"noise": NOISE_MODES.index("seeded"), "seed": 3, "flush": True}
    begin = reference.vocoder(window=window, **row_inputs(1, step=0, first=True, **noise))["pcm"]
    end = reference.vocoder(window=window, **row_inputs(1, step=1, last=True, **noise))["pcm"]
    whole = reference.vocoder(window=window, **row_inputs(1, step=0, first=True, last=True, **noise))["pcm"]
    assert torch.equal(torch.cat([begin, end], dim=1), whole)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_flush_decodes_fewer_frames_than_a_window(frames: int, golden: Any, reference: Any) -> None:
    ids = golden.snac["audio_ids_0"][: frames * IDS_PER_FRAME][None]
    pcm = reference.vocoder(window=ids, **row_inputs(1, flush=True, first=True, last=True))["pcm"]
    assert pcm.shape == (1, frames * golden.frame_samples)


def test_without_flush_the_flags_change_nothing(golden: Any, reference: Any) -> None:
    window = windows(golden.snac["audio_ids_0"])[:1]
    plain = reference.vocoder(window=window, **row_inputs(1))["pcm"]
    assert torch.equal(reference.vocoder(window=window, **row_inputs(1, first=True))["pcm"], plain)


def heard(built: Any, ids: Tensor, frames: int, flush: bool) -> list[bytes]:
    """Chunks of one stream, in the order of its windows, with seeded noise."""
    stream = built.spec.streams[0]
    cursor = ChunkCursor(stream.chunk.for_request({"first_window_frames": frames}), flush)
    cursor.push(len(ids))
    cursor.end(len(ids))
    found = []
    for step, chunk in enumerate(iter(cursor.pop, None)):
        row = row_inputs(1, step=step, first=chunk.first, last=chunk.last, flush=flush, seed=3, noise=1)
        (pcm,) = built.vocoder(window=ids[chunk.start : chunk.stop][None], **row)["pcm"]
        found += [] if pcm is None else [bytes(pcm.numpy())]
    return found


@pytest.mark.parametrize("frames", EARLY_FRAMES)
@pytest.mark.parametrize("flush", [False, True])
def test_an_early_first_window_changes_the_first_chunk_alone(
    sequence: int, frames: int, flush: bool, golden: Any, reference: Any
) -> None:
    ids = golden.snac[f"audio_ids_{sequence}"]
    if len(ids) < (WINDOW_FRAMES + 1) * IDS_PER_FRAME:
        pytest.skip("runs when MSTAR_GOLDEN names a set with a sequence of two windows or more")
    usual, early = (heard(reference, ids, count, flush) for count in (WINDOW_FRAMES, frames))
    assert early[1:] == usual[1:]
    assert [len(chunk) for chunk in early] == [len(chunk) for chunk in usual]
    assert early[0] != usual[0], "it has less context"


@pytest.mark.parametrize("frames", EARLY_FRAMES)
@pytest.mark.parametrize("total", range(2, 8))
def test_an_early_first_window_neither_skips_nor_repeats_a_frame(
    frames: int, total: int, golden: Any, reference: Any
) -> None:
    ids = golden.ids(total)[: total * IDS_PER_FRAME]
    size = 2 * golden.frame_samples
    assert sum(map(len, heard(reference, ids, frames, flush=True))) == total * size
    assert (
        sum(map(len, heard(reference, ids, frames, flush=False)))
        == (max(1, total - 3) if total >= frames else 0) * size
    )


def test_the_engine_batches_flushed_and_plain_requests_and_gives_each_its_own(golden: Any, reference: Any) -> None:
    node = reference.spec.node("snac_decoder")
    engine = StatelessEngine(node, reference.vocoder, device=torch.device("cpu"), dtype=torch.float32)
    window = windows(golden.snac["audio_ids_0"])[0]
    names = {"$step": "step", "$first": "first", "$last": "last"}
    names |= {from_param(name): name for name in ("flush", "noise", "seed")}
    rows = [
        row_inputs(1, seed=9, noise=1),
        row_inputs(1, seed=9, noise=1, flush=True, first=True),
        row_inputs(1, seed=9, noise=1, flush=True, last=True, step=1),
    ]
    for handle, row in enumerate(rows):
        engine.open(Handle(handle), SamplingParams(), 1)
        inputs = {name: row[word][0] for name, word in names.items()} | {"window": window}
        engine.submit(Job(key=JobKey(handle), handle=Handle(handle), inputs=inputs, outputs=("pcm",)))
    running = engine.launch()
    assert running is not None
    result = engine.collect(running)
    assert result.rows == len(rows), "one batch"
    per_frame = golden.frame_samples
    plain, begin, end = (done.outputs["pcm"] for done in sorted(result.done, key=lambda done: done.job.key))
    assert [len(each) // per_frame for each in (plain, begin, end)] == [1, 2, 2]
    assert torch.equal(begin[per_frame:], plain)


def test_ids_out_of_slot_are_counted_once_although_windows_overlap(golden: Any, checkpoint: Any) -> None:
    from mstar_core.plugin.model import ModelContext
    from mstar_orpheus.model import Orpheus
    from mstar_orpheus.plugin import ORPHEUS

    spec = ORPHEUS.bound(checkpoint, {})
    ctx = ModelContext(spec=spec, folder=checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    vocoder = Orpheus(ctx).get_submodule(spec.node("snac_decoder"))
    ids = golden.ids(WINDOW_FRAMES + 1).clone()
    ids[[0, WINDOW + 1]] += 2 * golden.json("config.json")["codebook_size"]
    batch = windows(ids)
    vocoder(window=batch, **row_inputs(len(batch), first=torch.arange(len(batch)) == 0))
    assert int(vocoder.misplaced_ids) == 2
