"""Model runner of a KV node: packs a step, runs the module once per kind of input, samples, commits. No policy.

Cost model: a decode step is a fixed number of numpy and torch calls whatever the batch. Python runs per sequence only
for prefill chunks and for sequences that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.cache.saved_pages import SavedPages
from mstar_core.engine.failures import node_error
from mstar_core.engine.kv.batch import (
    BatchOutput,
    DecodeBatch,
    Draws,
    PlainForward,
    ScheduledChunk,
    sampling_columns,
)
from mstar_core.engine.kv.inputs import id_port, packed_ports, packed_positions
from mstar_core.engine.sampling.sampler import Sampler
from mstar_core.engine.steps.attention import AttentionMetadata, starts_of
from mstar_core.engine.transfers import HostCopy, upload
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import PortType

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.base import Handle
    from mstar_core.engine.cache.memory import KVMemory
    from mstar_core.engine.cache.page_table import PageCopy
    from mstar_core.engine.cache.saved_pages import PageStore
    from mstar_core.engine.cuda_graphs.decode import DecodeSteps
    from mstar_core.engine.cuda_graphs.passes import LoopPassSteps
    from mstar_core.engine.cuda_graphs.prefill import PrefillSteps
    from mstar_core.engine.cuda_graphs.prompts import PromptSteps
    from mstar_core.engine.kv.mirror import LeaderMirror
    from mstar_core.engine.kv.sequence import ForwardPass
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

Faults = Callable[[Sequence["Handle"]], None]
"""Called with the handles of a forward before it runs; a test makes it raise."""

LOGITS: Final = "logits"
"""Output that every node with a head can give: head(hidden) of the job's tokens."""

_EMPTY: Final = np.zeros(0, dtype=np.int64)


class ModelRunner:
    """Runs steps of one module. Owned by the KV engine, which decides what is in them.

    decode, prefill, passes, prompts: captured steps, where the engine has any. mirror: publishes what the followers of
    a tensor-parallel group must do as well; None without one.
    """

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        attention: AttentionBackend,
        memory: KVMemory,
        store: PageStore,
        *,
        runs_ahead: bool,
        faults: Faults | None,
    ) -> None:
        self._spec = spec
        self._module = module
        self._attention = attention
        self._slots = memory.slots
        self._rows = memory.rows
        self._store = store
        self._tables = memory.tables
        self._runs_ahead = runs_ahead
        self._faults = faults
        self.mirror: LeaderMirror | None = None
        self.decode: DecodeSteps | None = None
        self.prefill: PrefillSteps | None = None
        self.passes: LoopPassSteps | None = None
        self.prompts: PromptSteps | None = None
        self.id_port = id_port(spec)
        self._row_ports = frozenset(spec.row_ports)
        self._fixed_ranks = fixed_ranks(spec)
        self._sampler = Sampler(spec, self._slots)

    def run(self, decode: DecodeBatch | None, chunks: Sequence[ScheduledChunk]) -> list[BatchOutput]:
        """Run one step. A sequence that fails is reported in its output; the others are computed and committed."""
        with torch.inference_mode():
            self._slots.flush()
            if self._rows is not None:
                self._rows.flush()
            self._clear_stale()
            outs = []
            if decode is not None and self.decode is not None and self._faults is None:
                outs = [self._replay_decode(self.decode, part) for part in self.decode.replayable(decode)]
            if outs:
                decode = None
                if not chunks:
                    return outs
            if not chunks:
                return self._isolated(decode, [])
            groups = self._grouped(chunks)
            plain = groups.pop((), [])
            prompts = self.prefill if self._faults is None else None
            if decode is None and plain and prompts is not None and prompts.most_tokens:
                replayed, plain = self._replay_prompts(prompts, plain)
                outs += replayed
            if decode is not None and self._rows is not None:  # its ports differ from those of prompts
                outs += self._isolated(decode, [])
                decode = None
            if decode is not None or plain:
                outs += self._isolated(decode, plain)
            for group in groups.values():
                outs += self._run_passes(group)
            return outs

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Carry out page copies that a page table requires."""
        with torch.inference_mode():
            self._clear_stale()
            if self.mirror is not None:
                self.mirror.pages_copied(copies)
            self._attention.copy_pages(copies)

    def save_pages(self, pages: Sequence[int]) -> SavedPages:
        """Start copying pages to the host."""
        saved = self._store.save(pages)
        if self.mirror is not None:
            self.mirror.pages_saved(saved, pages)
        return saved

    def gather_pages(self, pages: Sequence[int]) -> tuple[Tensor, ...]:
        """Copy pages into staging tensors, see PageStore.gather."""
        return self._store.gather(pages)

    def arrived_pages(self, groups: Sequence[Tensor], pages: int) -> SavedPages:
        """Return the pages of staging tensors from another rank. Raises EngineError if they do not fit the pools."""
        self._store.check(groups, pages)
        return SavedPages.arrived(groups)

    def restore_pages(self, saved: SavedPages, pages: Sequence[int]) -> None:
        """Write saved pages into these pages."""
        with torch.inference_mode():
            self._clear_stale()  # or the next step would clear them
        if self.mirror is not None:
            self.mirror.pages_restored(saved, pages)
        self._store.restore(saved, pages)

    def _clear_stale(self) -> None:
        """Clear pages that an earlier owner has written."""
        pages = self._tables.pool.take_stale()
        if pages and self.mirror is not None:
            self.mirror.pages_cleared(pages)
        self._attention.clear_pages(pages)

    # -- captured steps ----------------------------------------------------------------------------------------------

    def _replay_decode(self, steps: DecodeSteps, decode: DecodeBatch) -> BatchOutput:
        ids, reported = steps.run(decode)
        out = BatchOutput(decode, [], _EMPTY, _EMPTY, ids=ids, outputs=reported)
        out.host_ids = HostCopy(ids)
        self._commit(out, [])
        return out

    def _replay_prompts(
        self, prompts: PrefillSteps, chunks: list[ScheduledChunk]
    ) -> tuple[list[BatchOutput], list[ScheduledChunk]]:
        """Replay the chunks that a graph can take. Returns their outputs and the other chunks, which are counted."""
        outs = []
        prompts.counts.prefill_tokens += sum(chunk.count for chunk in chunks)
        fits = [chunk for chunk in chunks if prompts.suits(chunk)]
        rest = [chunk for chunk in chunks if not prompts.suits(chunk)]
        prompts.counts.prefill_misses += bool(rest)
        for batch in prompts.batches(fits) if fits else ():
            out = BatchOutput(None, batch, _EMPTY, _EMPTY)
            drawn = prompts.run(batch)
            for index, chunk in enumerate(batch):
                chunk.sampled_at = index if chunk.samples else -1
            if any(chunk.samples for chunk in batch):
                out.ids = drawn[: len(batch)]
                out.host_ids = HostCopy(out.ids)
            self._commit(out, [])
            outs.append(out)
        return outs, rest

    def _run_passes(self, chunks: list[ScheduledChunk]) -> list[BatchOutput]:
        """Run one group of passes: replay those that a graph can take, and run the others in a plain forward."""
        outs: list[BatchOutput] = []
        if self.passes is not None and self._faults is None:
            try:
                replayed, chunks = self.passes.run(chunks)
            except torch.OutOfMemoryError as error:
                if self.mirror is not None:  # the followers have run the replays
                    raise self.mirror.failed(error) from error
                # The outputs of a replay did not fit. Nothing is committed yet; run alone, only passes too large fail.
                for chunk in chunks:
                    chunk.iterations = chunk.forward.iterations
                self.passes.counts.misses += 1
                return self._isolated(None, chunks)
            for batch, outputs in replayed:
                out = BatchOutput(None, batch, _EMPTY, _EMPTY)
                self._commit(out, self._split_outputs(out, outputs, sum(chunk.count for chunk in batch)))
                outs.append(out)
        return outs + (self._isolated(None, chunks) if chunks else [])

    # -- plain forwards ----------------------------------------------------------------------------------------------

    def _grouped(self, chunks: Sequence[ScheduledChunk]) -> dict[tuple[object, ...], list[ScheduledChunk]]:
        """Return the chunks by forward. Chunks of ids have the key () and share the forward of the decode batch."""
        if len(chunks) == 1 and not chunks[0].forward.is_ids:
            return {("alone",): [*chunks]}
        groups: dict[tuple[object, ...], list[ScheduledChunk]] = {}
        for chunk in chunks:
            groups.setdefault(_signature(chunk.forward, self._spec.batch_key), []).append(chunk)
        return groups

    def _isolated(self, decode: DecodeBatch | None, chunks: list[ScheduledChunk]) -> list[BatchOutput]:
        """Run one forward. If it fails, run its sequences one by one, so that only the bad ones fail."""
        try:
            return [self._forward(decode, chunks)]
        except Exception as error:  # noqa: BLE001 the isolation boundary of a batch
            if (len(decode.branches) if decode else 0) + len(chunks) == 1:
                branch = decode.branches[0] if decode else chunks[0].branch
                failed = [(branch, node_error(self._spec.name, error))]
                return [BatchOutput(None, [], _EMPTY, _EMPTY, failed=failed)]
        outs = []
        for index in range(len(decode.branches) if decode else 0):
            assert decode is not None
            outs += self._isolated(decode.only(index, self._slots), [])
        for chunk in chunks:
            outs += self._isolated(None, [chunk])
        return outs

    def _forward(self, decode: DecodeBatch | None, chunks: list[ScheduledChunk]) -> BatchOutput:
        step = self._plain(decode, chunks)
        if self.mirror is None:
            return self._computed(step, decode, chunks)
        self.mirror.forward(step)
        with self.mirror.fail_stop():
            return self._computed(step, decode, chunks)

    def _computed(self, step: PlainForward, decode: DecodeBatch | None, chunks: list[ScheduledChunk]) -> BatchOutput:
        """Run a forward and commit it."""
        stopped = self._stopped(step)
        outputs = self._replayed_prompts(step, decode, chunks)
        if outputs is None:
            outputs = self.compute(step)
        out = BatchOutput(decode, chunks, _EMPTY, _EMPTY)
        shares = self._split_outputs(out, outputs, int(step.positions.shape[-1]))
        out.ids = self.finish(step, outputs, stopped)
        if out.ids is not None:
            out.host_ids = HostCopy(out.ids)
        self._commit(out, shares)
        return out

    def _replayed_prompts(
        self, step: PlainForward, decode: DecodeBatch | None, chunks: list[ScheduledChunk]
    ) -> dict[str, Tensor] | None:
        """Return the outputs of a captured forward of prompt passes; None if it has to run uncaptured."""
        if self.prompts is None or decode is not None or self.mirror is not None or self._faults is not None:
            return None
        return self.prompts.run(step, chunks)

    def _plain(self, decode: DecodeBatch | None, chunks: list[ScheduledChunk]) -> PlainForward:
        """Return the forward of a step. Raises for sequences that cannot be computed, before anything has changed."""
        slots = decode.slots if decode is not None else _EMPTY
        if self._faults is not None:
            branches = [*(decode.branches if decode else ()), *(chunk.branch for chunk in chunks)]
            self._faults([branch.request.handle for branch in branches])
        wants_logits = any(LOGITS in chunk.wants for chunk in chunks)
        if wants_logits and self._sampler.subset.are_some and self.mirror is not None:
            raise _no_logits(self._spec.name)  # before the group has begun the forward
        ports, positions = self._packed(decode, chunks)
        draws = self._draws(decode, chunks, int(positions.shape[-1]))
        return PlainForward(
            attention=self._metadata(slots, chunks),
            ports=ports,
            positions=positions,
            draws=draws,
            wants_logits=wants_logits,
            stores_rows=self._rows is not None and decode is not None,
            decode_slots=decode.on_device(self._slots)[0] if decode is not None else None,
        )

    def compute(self, step: PlainForward) -> dict[str, Tensor]:
        """Run the module. Returns its packed outputs, and logits if they are wanted."""
        view = self._attention.plan(step.attention)
        outputs = self._module(kv=view, positions=step.positions, **step.ports)
        if step.wants_logits and LOGITS not in outputs:
            if self._sampler.subset.are_some:
                raise _no_logits(self._spec.name)
            outputs[LOGITS] = self._module.head(outputs["hidden"]).float()
        return outputs

    def finish(self, step: PlainForward, outputs: dict[str, Tensor], stopped: Tensor | None) -> Tensor | None:
        """Draw ids and store the state of resident loops. Returns the ids, int64 [n]. Called by followers too."""
        ids = self._drawn(step.draws, outputs) if step.draws is not None else None
        if self._rows is not None and stopped is not None and step.decode_slots is not None:
            self._rows.store(step.decode_slots, step.ports, outputs, stopped)  # type: ignore[arg-type]
        return ids

    def _stopped(self, step: PlainForward) -> Tensor | None:
        """Return which sequences of a decode batch with state had stopped before this step: bool [n]."""
        if not step.stores_rows or step.decode_slots is None:
            return None
        return self._slots.device_stopped.index_select(0, step.decode_slots)

    def follow(self, step: PlainForward) -> None:
        """Run a forward that the leader of the group has published."""
        with torch.inference_mode():
            stopped = self._stopped(step)
            self.finish(step, self.compute(step), stopped)

    def _metadata(self, slots: np.ndarray, chunks: list[ScheduledChunk]) -> AttentionMetadata:
        """Return the metadata of a decode batch in these slots (int64 [n]) and of chunks behind it."""
        tables = self._tables
        decode = AttentionMetadata.of(slots, tables.length[slots], tables.ids)
        if not chunks:
            return decode
        passes = []
        for chunk in chunks:
            attend, slot = chunk.forward.attend, chunk.branch.slot
            length, count = int(tables.length[slot]), chunk.count // chunk.forward.iterations
            flags = attend.mask == "causal", attend.write
            passes += [(slot, length + at, count, *flags) for at in range(0, chunk.count, count)]
        rows, lengths, counts, causal, writes = (np.array(column) for column in zip(*passes, strict=True))
        return AttentionMetadata(
            query_starts=starts_of(np.concatenate([decode.counts, counts])),
            page_rows=np.concatenate([slots, rows]),
            lengths=np.concatenate([decode.lengths, lengths]),
            causal=np.concatenate([decode.causal, causal]),
            writes=np.concatenate([decode.writes, writes]),
            tables=tables.ids,
        )

    def _packed(
        self, decode: DecodeBatch | None, chunks: list[ScheduledChunk]
    ) -> tuple[dict[str, Tensor | list[Tensor]], Tensor]:
        """Return the module's ports and positions, all sequences packed."""
        slots = self._slots
        ids = slots.device_last.index_select(0, decode.on_device(slots)[0]) if decode is not None else None
        own = upload(slots.positions(decode.slots), slots.device) if decode is not None else None
        if not chunks:
            assert ids is not None and own is not None and decode is not None
            return self._decode_ports(decode, ids), own
        return packed_ports(chunks, ids, slots.device), packed_positions(chunks, own, slots.device)

    def _decode_ports(self, decode: DecodeBatch, ids: Tensor) -> dict[str, Tensor | list[Tensor]]:
        rows, slots = self._rows, self._slots
        if rows is None:
            return {self.id_port: ids}
        if decode.random_states is None:
            decode.random_states = rows.random_states(decode.slots)
        values = rows.values(decode.slots, decode.random_states)
        host = {name: upload(value, slots.device) for name, value in values.items()}
        return {rows.ports.id_port: ids, **rows.inputs(decode.on_device(slots)[0], host)}

    def _draws(self, decode: DecodeBatch | None, chunks: list[ScheduledChunk], total: int) -> Draws | None:
        """Return the ids to draw: for the decode batch and for the last tokens of sampling chunks."""
        drawing = [chunk for chunk in chunks if chunk.samples]
        if decode is None and not drawing:
            return None
        indices = decode.slots if decode is not None else _EMPTY
        tracked = len(indices) if self._runs_ahead else 0
        if not chunks:
            assert decode is not None
            return Draws(slots=indices, tracked=tracked, device=decode.on_device(self._slots))
        ends = list(range(len(indices)))
        at = len(indices)
        for chunk in chunks:
            at += chunk.count
            if chunk.samples:
                chunk.sampled_at = len(ends)
                ends.append(at - 1)
        indices = np.concatenate([indices, np.array([chunk.branch.slot for chunk in drawing], dtype=np.int64)])
        rows = np.array(ends, dtype=np.int64) if len(ends) != total else None
        return Draws(slots=indices, tracked=tracked, ends=rows)

    def _drawn(self, draws: Draws, outputs: dict[str, Tensor]) -> Tensor:
        """Draw ids and advance the device state of their sequences."""
        slots, indices, hidden = self._slots, draws.slots, outputs["hidden"]
        if draws.ends is not None:
            hidden = hidden.index_select(0, upload(draws.ends, hidden.device))
        device_slots, sampling = draws.device or (upload(indices, slots.device), sampling_columns(indices, slots))
        chance = upload(sampling.chance(slots.drawn[indices]), slots.device)
        ids = self._sampler.draw(self._module.head(hidden), sampling.columns, chance, device_slots)
        return self._sampler.store(sampling.columns, device_slots, ids, draws.tracked)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _split_outputs(
        self, out: BatchOutput, outputs: dict[str, Tensor], total: int
    ) -> list[tuple[ForwardPass, str, Tensor]]:
        """Return each chunk's share of the outputs that it wants; kept only if the whole forward succeeds."""
        if out.decode is not None and out.decode.reports:
            out.outputs = {port: outputs[port] for port in out.decode.reports if port in outputs}
        start = 0 if out.decode is None else len(out.decode.branches)
        shares = []
        for index, chunk in enumerate(out.chunks):
            for port in chunk.wants:
                if port in outputs:
                    place = (index, start, chunk.count, total)
                    shares.append((chunk.forward, port, self._share(out, port, outputs[port], place)))
            start += chunk.count
        return shares

    def _share(
        self, out: BatchOutput, port: str, value: Tensor | list[Tensor], place: tuple[int, int, int, int]
    ) -> Tensor:
        """Return one chunk's share of a packed output: its tokens, else its batch item, else (alone) the whole."""
        index, start, count, total = place
        if isinstance(value, list):
            return value[index]
        is_by_item = out.decode is None and value.dim() > 0 and value.shape[0] == len(out.chunks)
        if port in self._row_ports:
            if is_by_item:
                return value[index]
        elif is_by_item and value.dim() - 1 == self._fixed_ranks.get(port):
            return value[index]
        elif value.dim() and value.shape[0] == total:
            return value[start : start + count]
        elif out.decode is None and len(out.chunks) == 1:
            return value
        elif is_by_item:
            return value[index]
        raise EngineError(
            f"node {self._spec.name} gave {port!r} in a form that cannot be divided among its sequences",
            f"first dimension {list(value.shape)[:1]} is neither {total} tokens nor {len(out.chunks)} sequences",
            node=self._spec.name,
        )

    def _commit(self, out: BatchOutput, shares: list[tuple[ForwardPass, str, Tensor]]) -> None:
        """Advance the host's counts. Nothing before this changes them, so a failed forward leaves no trace."""
        slots, tables = self._slots, self._tables
        for forward, port, share in shares:
            forward.chunk_outputs.setdefault(port, []).append(share)
        if out.decode is not None:
            indices = out.decode.slots
            tables.length[indices] += 1
            slots.next_position[indices] += 1
            slots.drawn[indices] += 1
            slots.left[indices] -= 1
            if self._rows is not None and self._rows.feeds is not None:
                self._rows.feeds.take(indices)
            out.place = tables.length[indices]
            out.left = slots.left[indices]
        for chunk in out.chunks:
            chunk.forward.done += chunk.count
            if chunk.forward.attend.write:
                tables.length[chunk.branch.slot] += chunk.count
            if chunk.samples:
                slots.drawn[chunk.branch.slot] += 1


def _no_logits(node: str) -> EngineError:
    return EngineError(
        f"node {node} has no logits of its whole vocabulary",
        "its head was cut down to the ids that it can draw (Sampling.vocabulary)",
        "start the deployment with the whole vocabulary",
        node=node,
    )


def fixed_ranks(spec: NodeSpec) -> dict[str, int]:
    """Return the ranks of ports whose types declare every dimension as a number: one value per sequence."""
    shapes = {name: PortType.parse(text).shape for name, text in spec.ports.items()}
    return {name: len(shape) for name, shape in shapes.items() if shape and all(isinstance(n, int) for n in shape)}


def _signature(forward: ForwardPass, batch_key: Sequence[str]) -> tuple[object, ...]:
    """Return what passes must have in common to share a forward.

    batch_key: the ports with one value per batch item whose shapes must agree; all of them if it is empty.
    """
    if forward.is_ids:
        return ()
    parts: list[tuple[object, ...]] = []
    for name, axis in sorted(forward.axes.items()):
        value = forward.ports[name]
        if name in forward.per_row:
            parts.append((name, value.dtype, value.shape if not batch_key or name in batch_key else None))
        elif axis is None:
            return ("alone", id(forward))
        else:
            parts.append((name, value.dtype, axis))
    return (*parts, forward.given.dim() if forward.given is not None else 0)
