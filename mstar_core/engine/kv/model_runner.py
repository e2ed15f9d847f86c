"""One step of a KV node: packs rows, runs the module once per kind of input, samples, commits. No policy.

Cost model: a decode step is a fixed number of numpy and torch calls whatever the batch; Python runs per row only
for prefill chunks and for rows that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention import PackedRows, Segment
from mstar_core.engine.failures import node_error
from mstar_core.engine.kv.batch import BatchOutput, DecodeBatch, ScheduledChunk, sampling_parameters
from mstar_core.engine.kv.inputs import id_port, packed_ports, packed_positions
from mstar_core.engine.sampling import sampler
from mstar_core.engine.sampling.logit_subset import Columns
from mstar_core.engine.transfers import HostCopy, upload
from mstar_core.errors import EngineError, MstarError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.base import Handle
    from mstar_core.engine.cache.page_table import PageCopy, PageTables
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.cuda_graphs.decode import DecodeSteps
    from mstar_core.engine.cuda_graphs.passes import LoopPassSteps
    from mstar_core.engine.cuda_graphs.prefill import PrefillSteps
    from mstar_core.engine.kv.sequence import ForwardPass
    from mstar_core.graph.spec.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

Faults = Callable[[Sequence["Handle"]], None]
"""Called with the handles of a forward before it runs; a test makes it raise."""

LOGITS: Final = "logits"
"""Output that the engine can always give: head(hidden) of the job's tokens."""

_EMPTY: Final = np.zeros(0, dtype=np.int64)


class ModelRunner:
    """Runs steps of one module. Owned by the KV engine, which decides what is in them."""

    def __init__(
        self, spec: NodeSpec, module: KVModule, attention: AttentionBackend, slots: Slots, tables: PageTables,
        *, runs_ahead: bool, faults: Faults | None,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._module = module
        self._attention = attention
        self._slots = slots
        self._tables = tables
        self._runs_ahead = runs_ahead
        self._faults = faults
        self.decode: DecodeSteps | None = None
        self.prefill: PrefillSteps | None = None
        self.passes: LoopPassSteps | None = None
        self.id_port = id_port(spec)
        self._history = spec.sampling.history if spec.sampling else "none"
        self._row_ports = frozenset(spec.row_ports)
        self._columns = Columns(spec, slots.device_seen.shape[1], slots.device)

    def run(self, decode: DecodeBatch | None, chunks: Sequence[ScheduledChunk]) -> list[BatchOutput]:
        """Run everything of one step. A row that fails is reported in its out; the others are done and committed."""
        with torch.inference_mode():
            self._slots.flush()
            self._attention.clear_pages(self._tables.pool.take_stale())
            outs = []
            if decode is not None and self.decode is not None and self._faults is None and self.decode.takes(decode):
                outs.append(self._replayed(self.decode, decode))
                decode = None
                if not chunks:
                    return outs
            if not chunks:
                return self._isolated(decode, [])
            groups = self._grouped(chunks)
            plain = groups.pop((), [])
            prompts = self.prefill if self._faults is None else None
            if decode is None and plain and prompts is not None and prompts.most_tokens:
                replayed, plain = self._prompted(prompts, plain)
                outs += replayed
            if decode is not None or plain:
                outs += self._isolated(decode, plain)
            for group in groups.values():
                outs += self._passed(group)
            return outs

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Do page copies that a table asked for."""
        with torch.inference_mode():
            self._attention.clear_pages(self._tables.pool.take_stale())
            self._attention.copy_pages(copies)

    def _replayed(self, graphs: DecodeSteps, decode: DecodeBatch) -> BatchOutput:
        """The decode rows by a captured step."""
        ids, reported = graphs.run(decode)
        out = BatchOutput(decode, [], _EMPTY, _EMPTY, ids=ids, outputs=reported)
        out.host_ids = HostCopy(ids)
        self._commit(out, [])
        return out

    def _prompted(
        self, prompts: PrefillSteps, chunks: list[ScheduledChunk]
    ) -> tuple[list[BatchOutput], list[ScheduledChunk]]:
        """Run what captured prompts can take; the rest is left to the plain forward, and counted."""
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

    def _passed(self, chunks: list[ScheduledChunk]) -> list[BatchOutput]:
        """One group of passes: by captured ones where they take them, else by a plain forward."""
        outs: list[BatchOutput] = []
        if self.passes is not None and self._faults is None:
            try:
                replayed, chunks = self.passes.run(chunks)
            except torch.OutOfMemoryError:
                # There is no room for what a replay gave. Nothing is committed yet: row by row it shows who lacks it.
                for chunk in chunks:
                    chunk.iterations = chunk.forward.iterations
                self.passes.counts.misses += 1
                return self._isolated(None, chunks)
            for batch, outputs in replayed:
                out = BatchOutput(None, batch, _EMPTY, _EMPTY)
                self._commit(out, self._split_outputs(out, outputs, sum(chunk.count for chunk in batch)))
                outs.append(out)
        return outs + (self._isolated(None, chunks) if chunks else [])

    def _grouped(self, chunks: Sequence[ScheduledChunk]) -> dict[tuple[object, ...], list[ScheduledChunk]]:
        """Pieces that one forward can take together; ids share theirs with the decode rows under the key ()."""
        if len(chunks) == 1 and not chunks[0].forward.is_ids:
            return {("alone",): [*chunks]}
        groups: dict[tuple[object, ...], list[ScheduledChunk]] = {}
        for chunk in chunks:
            groups.setdefault(_signature(chunk.forward, self._spec.batch_key), []).append(chunk)
        return groups

    def _isolated(self, decode: DecodeBatch | None, chunks: list[ScheduledChunk]) -> list[BatchOutput]:
        """Run one forward; when it fails, run its rows one by one so that only the bad ones fail."""
        try:
            return [self._forward(decode, chunks)]
        except Exception as error:  # noqa: BLE001 the isolation boundary of a batch
            rows = (len(decode.branches) if decode else 0) + len(chunks)
            if rows == 1:
                branch = decode.branches[0] if decode else chunks[0].branch
                out = BatchOutput(None, [], _EMPTY, _EMPTY, failed=[(branch, self._error(error))])
                return [out]
        outs = []
        for index in range(len(decode.branches) if decode else 0):
            assert decode is not None
            outs += self._isolated(decode.only(index, self._slots), [])
        for chunk in chunks:
            outs += self._isolated(None, [chunk])
        return outs

    def _error(self, error: Exception) -> MstarError:
        return node_error(self._spec.name, error)

    def _forward(self, decode: DecodeBatch | None, chunks: list[ScheduledChunk]) -> BatchOutput:
        tables = self._tables
        rows = decode.slots if decode is not None else _EMPTY
        if self._faults is not None:
            branches = [*(decode.branches if decode else ()), *(chunk.branch for chunk in chunks)]
            self._faults([branch.request.handle for branch in branches])
        cached = tables.length[rows]
        segments = self._segments(len(rows), chunks)
        view = self._attention.plan(PackedRows(decode=rows, cached=cached, segments=segments, tables=tables.ids))
        ports, positions = self._packed(decode, chunks)
        outputs = self._module(kv=view, positions=positions, **ports)
        total = int(positions.shape[-1])
        if LOGITS not in outputs and any(LOGITS in chunk.wants for chunk in chunks):
            if self._columns.are_some:
                raise _no_logits(self._spec.name)
            outputs[LOGITS] = self._module.head(outputs["hidden"]).float()
        out = BatchOutput(decode, chunks, _EMPTY, _EMPTY)
        shares = self._split_outputs(out, outputs, total)
        out.ids = self._sampled(decode, chunks, outputs, total)
        if out.ids is not None:
            out.host_ids = HostCopy(out.ids)
        self._commit(out, shares)
        return out

    def _segments(self, start: int, chunks: list[ScheduledChunk]) -> list[Segment]:
        segments = []
        for chunk in chunks:
            attend, row = chunk.forward.attend, chunk.branch.slot
            cached, count = int(self._tables.length[row]), chunk.count // chunk.forward.iterations
            for before in range(0, chunk.count, count):
                segment = Segment(
                    start=start, count=count, row=row, cached=cached + before, is_causal=attend.mask == "causal",
                    writes=attend.write,
                )  # fmt: skip
                segments.append(segment)
                start += count
        return segments

    def _packed(
        self, decode: DecodeBatch | None, chunks: list[ScheduledChunk]
    ) -> tuple[dict[str, Tensor | list[Tensor]], Tensor]:
        """The module's ports and positions, all rows one after the other."""
        slots = self._slots
        ids = slots.device_last.index_select(0, decode.on_device(slots)[0]) if decode is not None else None
        own = upload(slots.next_position[decode.slots], slots.device) if decode is not None else None
        if not chunks:
            assert ids is not None and own is not None
            return {self.id_port: ids}, own
        return packed_ports(chunks, ids, slots.device), packed_positions(chunks, own, slots.device)

    def _sampled(
        self, decode: DecodeBatch | None, chunks: list[ScheduledChunk], outputs: dict[str, Tensor], total: int
    ) -> Tensor | None:
        """Draw ids for the decode rows and for the last tokens of sampling chunks; advances their device state."""
        drawing = [chunk for chunk in chunks if chunk.samples]
        if decode is None and not drawing:
            return None
        slots = self._slots
        rows = decode.slots if decode is not None else _EMPTY
        device_rows, sampling = decode.on_device(slots) if decode is not None else (None, None)
        hidden = outputs["hidden"]
        if chunks:
            ends = list(range(len(rows)))
            at = len(rows)
            for chunk in chunks:
                at += chunk.count
                if chunk.samples:
                    chunk.sampled_at = len(ends)
                    ends.append(at - 1)
            if len(ends) != total:
                hidden = hidden.index_select(0, upload(np.array(ends, dtype=np.int64), hidden.device))
            rows = np.concatenate([rows, np.array([chunk.branch.slot for chunk in drawing], dtype=np.int64)])
            device_rows, sampling = None, None
        if device_rows is None or sampling is None:
            device_rows, sampling = upload(rows, slots.device), sampling_parameters(rows, slots)
        logits = self._module.head(hidden)
        if logits.dtype != torch.float32 or self._columns.has_suppressed:
            logits = logits.to(torch.float32, copy=True)
        logits = self._columns.suppress(logits)
        is_penalised = sampling.is_penalised and self._history != "none"
        seen = self._columns.seen(slots.device_seen.index_select(0, device_rows)) if is_penalised else None
        counter = upload(slots.drawn[rows], slots.device) if not sampling.all_greedy else device_rows
        ids = self._columns.drawn(sampler.sample(logits, sampling, seen, counter))
        if self._runs_ahead and decode is not None:
            ids = self._held_back(decode, ids)
        slots.device_last.index_copy_(0, device_rows, ids)
        if is_penalised:
            slots.device_seen[device_rows, ids] = True
        return ids

    def _held_back(self, decode: DecodeBatch, ids: Tensor) -> Tensor:
        """Let rows that stopped in a step not yet collected repeat their last id, and note who stops now."""
        slots, rows = self._slots, decode.on_device(self._slots)[0]
        count = len(decode.branches)
        stopped = slots.device_stopped.index_select(0, rows)
        drawn = torch.where(stopped, slots.device_last.index_select(0, rows), ids[:count])
        hit = (drawn[:, None] == slots.device_stop_ids.index_select(0, rows)).any(dim=1)
        slots.device_stopped.index_copy_(0, rows, stopped | hit)
        return torch.cat([drawn, ids[count:]]) if len(ids) > count else drawn

    def _split_outputs(
        self, out: BatchOutput, outputs: dict[str, Tensor], total: int
    ) -> list[tuple[ForwardPass, str, Tensor]]:
        """Each chunk's share of the outputs it wants; kept only when the whole forward went well."""
        if out.decode is not None and out.decode.reports:
            out.outputs = {port: outputs[port] for port in out.decode.reports if port in outputs}
        start = 0 if out.decode is None else len(out.decode.branches)
        shares = []
        for index, chunk in enumerate(out.chunks):
            for port in chunk.wants:
                if port in outputs:
                    shares.append(
                        (
                            chunk.forward,
                            port,
                            self._chunk_output(out, port, outputs[port], (index, start, chunk.count, total)),
                        )
                    )
            start += chunk.count
        return shares

    def _chunk_output(self, out: BatchOutput, port: str, value: Tensor, place: tuple[int, int, int, int]) -> Tensor:
        """The share of one chunk in a packed output: its tokens, else its row, else (alone) all of it."""
        index, start, count, total = place
        if port in self._row_ports:
            if out.decode is None and value.dim() and value.shape[0] == len(out.chunks):
                return value[index]
        elif value.dim() and value.shape[0] == total:
            return value[start : start + count]
        elif out.decode is None and len(out.chunks) == 1:
            return value
        elif out.decode is None and value.dim() and value.shape[0] == len(out.chunks):
            return value[index]
        raise EngineError(
            f"node {self._spec.name} gave {port!r} in a form that cannot be divided among its rows",
            f"first dimension {list(value.shape)[:1]} is neither {total} tokens nor {len(out.chunks)} rows",
            node=self._spec.name,
        )

    def _commit(self, out: BatchOutput, shares: list[tuple[ForwardPass, str, Tensor]]) -> None:
        """Advance the host's counts. Nothing above has changed them, so a failed forward leaves no trace."""
        slots, tables = self._slots, self._tables
        for forward, port, share in shares:
            forward.chunk_outputs.setdefault(port, []).append(share)
        if out.decode is not None:
            rows = out.decode.slots
            tables.length[rows] += 1
            slots.next_position[rows] += 1
            slots.drawn[rows] += 1
            slots.left[rows] -= 1
            out.place = tables.length[rows]
            out.left = slots.left[rows]
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


def _signature(forward: ForwardPass, batch_key: Sequence[str]) -> tuple[object, ...]:
    """What passes must agree in to share a forward. batch_key: where not empty, the row ports whose shapes count."""
    if forward.is_ids:
        return ()
    rows = forward.per_row
    outs: list[tuple[object, ...]] = []
    for name, axis in sorted(forward.axes.items()):
        value = forward.ports[name]
        if name in rows:
            outs.append((name, value.dtype, value.shape if not batch_key or name in batch_key else None))
        elif axis is None:
            return ("alone", id(forward))
        else:
            outs.append((name, value.dtype, axis))
    return (*outs, forward.given.dim() if forward.given is not None else 0)
