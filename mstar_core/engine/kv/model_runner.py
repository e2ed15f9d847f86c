"""One step of a KV node: packs rows, runs the module once per kind of input, samples, commits. No policy.

Cost model: a decode step is a fixed number of numpy and torch calls whatever the batch; Python runs per row only
for prefill pieces and for rows that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention import PackedRows, Segment
from mstar_core.engine.device import HostCopy
from mstar_core.engine.failures import node_error
from mstar_core.engine.kv.batch import DecodeBatch, Part, Piece, sampling_parameters
from mstar_core.engine.kv.chunk_inputs import packed_ports, packed_positions
from mstar_core.engine.sampling import sampler
from mstar_core.engine.sampling.logit_subset import Columns
from mstar_core.engine.upload import upload
from mstar_core.errors import EngineError, MstarError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.base import Handle
    from mstar_core.engine.cache.page_table import PageCopy, PageTables
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.cuda_graphs.decode import DecodeGraphs
    from mstar_core.engine.cuda_graphs.passes import PassGraphs
    from mstar_core.engine.cuda_graphs.prefill import PrefillGraphs
    from mstar_core.engine.kv.sequence import Firing
    from mstar_core.engine.kv_view import KVModule
    from mstar_core.graph.spec.nodes import NodeSpec

Faults = Callable[[Sequence["Handle"]], None]
"""Called with the handles of a forward before it runs; a test makes it raise."""

LOGITS: Final = "logits"
"""Output that the engine can always give: head(hidden) of the job's tokens."""

_EMPTY: Final = np.zeros(0, dtype=np.int64)


class StepRunner:
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
        self.graphs: DecodeGraphs | None = None
        self.prompts: PrefillGraphs | None = None
        self.passes: PassGraphs | None = None
        self.id_port = id_port(spec)
        self._history = spec.sampling.history if spec.sampling else "none"
        self._row_ports = frozenset(spec.row_ports)
        self._columns = Columns(spec, slots.device_seen.shape[1], slots.device)

    def run(self, decode: DecodeBatch | None, pieces: Sequence[Piece]) -> list[Part]:
        """Run everything of one step. A row that fails is reported in its part; the others are done and committed."""
        with torch.inference_mode():
            self._slots.flush()
            self._attention.clear_pages(self._tables.pool.take_stale())
            parts = []
            if decode is not None and self.graphs is not None and self._faults is None and self.graphs.takes(decode):
                parts.append(self._replayed(self.graphs, decode))
                decode = None
                if not pieces:
                    return parts
            if not pieces:
                return self._isolated(decode, [])
            groups = self._grouped(pieces)
            plain = groups.pop((), [])
            prompts = self.prompts if self._faults is None else None
            if decode is None and plain and prompts is not None and prompts.most_tokens:
                replayed, plain = self._prompted(prompts, plain)
                parts += replayed
            if decode is not None or plain:
                parts += self._isolated(decode, plain)
            for group in groups.values():
                parts += self._passed(group)
            return parts

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Do page copies that a table asked for."""
        with torch.inference_mode():
            self._attention.clear_pages(self._tables.pool.take_stale())
            self._attention.copy_pages(copies)

    def _replayed(self, graphs: DecodeGraphs, decode: DecodeBatch) -> Part:
        """The decode rows by a captured step."""
        part = Part(decode, [], _EMPTY, _EMPTY, ids=graphs.run(decode))
        assert part.ids is not None
        part.host_ids = HostCopy(part.ids)
        self._commit(part, [])
        return part

    def _prompted(self, prompts: PrefillGraphs, pieces: list[Piece]) -> tuple[list[Part], list[Piece]]:
        """Run what captured prompts can take; the rest is left to the plain forward, and counted."""
        parts = []
        prompts.counts.prefill_tokens += sum(piece.count for piece in pieces)
        fits = [piece for piece in pieces if prompts.suits(piece)]
        rest = [piece for piece in pieces if not prompts.suits(piece)]
        prompts.counts.prefill_misses += bool(rest)
        for batch in prompts.batches(fits) if fits else ():
            part = Part(None, batch, _EMPTY, _EMPTY)
            drawn = prompts.run(batch)
            for index, piece in enumerate(batch):
                piece.sampled_at = index if piece.samples else -1
            if any(piece.samples for piece in batch):
                part.ids = drawn[: len(batch)]
                part.host_ids = HostCopy(part.ids)
            self._commit(part, [])
            parts.append(part)
        return parts, rest

    def _passed(self, pieces: list[Piece]) -> list[Part]:
        """One group of passes: by captured ones where they take them, else by a plain forward."""
        parts: list[Part] = []
        if self.passes is not None and self._faults is None:
            try:
                replayed, pieces = self.passes.run(pieces)
            except torch.OutOfMemoryError:
                # There is no room for what a replay gave. Nothing is committed yet: row by row it shows who lacks it.
                for piece in pieces:
                    piece.iterations = piece.firing.iterations
                self.passes.counts.misses += 1
                return self._isolated(None, pieces)
            for batch, outputs in replayed:
                part = Part(None, batch, _EMPTY, _EMPTY)
                self._commit(part, self._chunks(part, outputs, sum(piece.count for piece in batch)))
                parts.append(part)
        return parts + (self._isolated(None, pieces) if pieces else [])

    def _grouped(self, pieces: Sequence[Piece]) -> dict[tuple[object, ...], list[Piece]]:
        """Pieces that one forward can take together; ids share theirs with the decode rows under the key ()."""
        if len(pieces) == 1 and not pieces[0].firing.is_ids:
            return {("alone",): [*pieces]}
        groups: dict[tuple[object, ...], list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(_signature(piece.firing, self._spec.batch_key), []).append(piece)
        return groups

    def _isolated(self, decode: DecodeBatch | None, pieces: list[Piece]) -> list[Part]:
        """Run one forward; when it fails, run its rows one by one so that only the bad ones fail."""
        try:
            return [self._forward(decode, pieces)]
        except Exception as error:  # noqa: BLE001 the isolation boundary of a batch
            rows = (len(decode.branches) if decode else 0) + len(pieces)
            if rows == 1:
                branch = decode.branches[0] if decode else pieces[0].branch
                part = Part(None, [], _EMPTY, _EMPTY, failed=[(branch, self._error(error))])
                return [part]
        parts = []
        for index in range(len(decode.branches) if decode else 0):
            assert decode is not None
            parts += self._isolated(decode.only(index, self._slots), [])
        for piece in pieces:
            parts += self._isolated(None, [piece])
        return parts

    def _error(self, error: Exception) -> MstarError:
        return node_error(self._spec.name, error)

    def _forward(self, decode: DecodeBatch | None, pieces: list[Piece]) -> Part:
        tables = self._tables
        rows = decode.slots if decode is not None else _EMPTY
        if self._faults is not None:
            branches = [*(decode.branches if decode else ()), *(piece.branch for piece in pieces)]
            self._faults([branch.request.handle for branch in branches])
        cached = tables.length[rows]
        segments = self._segments(len(rows), pieces)
        view = self._attention.plan(PackedRows(decode=rows, cached=cached, segments=segments, tables=tables.ids))
        ports, positions = self._packed(decode, pieces)
        outputs = self._module(kv=view, positions=positions, **ports)
        total = int(positions.shape[-1])
        if LOGITS not in outputs and any(LOGITS in piece.wants for piece in pieces):
            if self._columns.are_some:
                raise _no_logits(self._spec.name)
            outputs[LOGITS] = self._module.head(outputs["hidden"]).float()
        part = Part(decode, pieces, _EMPTY, _EMPTY)
        chunks = self._chunks(part, outputs, total)
        part.ids = self._sampled(decode, pieces, outputs, total)
        if part.ids is not None:
            part.host_ids = HostCopy(part.ids)
        self._commit(part, chunks)
        return part

    def _segments(self, start: int, pieces: list[Piece]) -> list[Segment]:
        segments = []
        for piece in pieces:
            attend, row = piece.firing.attend, piece.branch.slot
            cached, count = int(self._tables.length[row]), piece.count // piece.firing.iterations
            for before in range(0, piece.count, count):
                segment = Segment(
                    start=start, count=count, row=row, cached=cached + before, is_causal=attend.mask == "causal",
                    writes=attend.write,
                )  # fmt: skip
                segments.append(segment)
                start += count
        return segments

    def _packed(
        self, decode: DecodeBatch | None, pieces: list[Piece]
    ) -> tuple[dict[str, Tensor | list[Tensor]], Tensor]:
        """The module's ports and positions, all rows one after the other."""
        slots = self._slots
        ids = slots.device_last.index_select(0, decode.on_device(slots)[0]) if decode is not None else None
        own = upload(slots.next_position[decode.slots], slots.device) if decode is not None else None
        if not pieces:
            assert ids is not None and own is not None
            return {self.id_port: ids}, own
        return packed_ports(pieces, ids, slots.device), packed_positions(pieces, own, slots.device)

    def _sampled(
        self, decode: DecodeBatch | None, pieces: list[Piece], outputs: dict[str, Tensor], total: int
    ) -> Tensor | None:
        """Draw ids for the decode rows and for the last tokens of sampling pieces; advances their device state."""
        drawing = [piece for piece in pieces if piece.samples]
        if decode is None and not drawing:
            return None
        slots = self._slots
        rows = decode.slots if decode is not None else _EMPTY
        device_rows, sampling = decode.on_device(slots) if decode is not None else (None, None)
        hidden = outputs["hidden"]
        if pieces:
            ends = list(range(len(rows)))
            at = len(rows)
            for piece in pieces:
                at += piece.count
                if piece.samples:
                    piece.sampled_at = len(ends)
                    ends.append(at - 1)
            if len(ends) != total:
                hidden = hidden.index_select(0, upload(np.array(ends, dtype=np.int64), hidden.device))
            rows = np.concatenate([rows, np.array([piece.branch.slot for piece in drawing], dtype=np.int64)])
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

    def _chunks(self, part: Part, outputs: dict[str, Tensor], total: int) -> list[tuple[Firing, str, Tensor]]:
        """Each piece's share of the outputs it wants; kept only when the whole forward went well."""
        if part.decode is not None and part.decode.reports:
            part.outputs = outputs
        start = 0 if part.decode is None else len(part.decode.branches)
        chunks = []
        for index, piece in enumerate(part.pieces):
            for port in piece.wants:
                if port in outputs:
                    chunks.append(
                        (piece.firing, port, self._chunk(part, port, outputs[port], (index, start, piece.count, total)))
                    )
            start += piece.count
        return chunks

    def _chunk(self, part: Part, port: str, value: Tensor, place: tuple[int, int, int, int]) -> Tensor:
        """The share of one piece in a packed output: its tokens, else its row, else (alone) all of it."""
        index, start, count, total = place
        if port in self._row_ports:
            if part.decode is None and value.dim() and value.shape[0] == len(part.pieces):
                return value[index]
        elif value.dim() and value.shape[0] == total:
            return value[start : start + count]
        elif part.decode is None and len(part.pieces) == 1:
            return value
        elif part.decode is None and value.dim() and value.shape[0] == len(part.pieces):
            return value[index]
        raise EngineError(
            f"node {self._spec.name} gave {port!r} in a form that cannot be divided among its rows",
            f"first dimension {list(value.shape)[:1]} is neither {total} tokens nor {len(part.pieces)} rows",
            node=self._spec.name,
        )

    def _commit(self, part: Part, chunks: list[tuple[Firing, str, Tensor]]) -> None:
        """Advance the host's counts. Nothing above has changed them, so a failed forward leaves no trace."""
        slots, tables = self._slots, self._tables
        for firing, port, chunk in chunks:
            firing.parts.setdefault(port, []).append(chunk)
        if part.decode is not None:
            rows = part.decode.slots
            tables.length[rows] += 1
            slots.next_position[rows] += 1
            slots.drawn[rows] += 1
            slots.left[rows] -= 1
            part.place = tables.length[rows]
            part.left = slots.left[rows]
        for piece in part.pieces:
            piece.firing.done += piece.count
            if piece.firing.attend.write:
                tables.length[piece.branch.slot] += piece.count
            if piece.samples:
                slots.drawn[piece.branch.slot] += 1


def _no_logits(node: str) -> EngineError:
    return EngineError(
        f"node {node} has no logits of its whole vocabulary",
        "its head was cut down to the ids that it can draw (Sampling.vocabulary)",
        "start the deployment with the whole vocabulary",
        node=node,
    )


def id_port(spec: NodeSpec) -> str:
    """Under which name ids reach the module: `tokens` where the node has that port, else the port it samples."""
    if "tokens" in spec.ports or spec.sampling is None:
        return "tokens"
    return spec.sampling.port


def _signature(firing: Firing, batch_key: Sequence[str]) -> tuple[object, ...]:
    """What passes must agree in to share a forward. batch_key: where not empty, the row ports whose shapes count."""
    if firing.is_ids:
        return ()
    rows = firing.per_row
    parts: list[tuple[object, ...]] = []
    for name, axis in sorted(firing.axes.items()):
        value = firing.ports[name]
        if name in rows:
            parts.append((name, value.dtype, value.shape if not batch_key or name in batch_key else None))
        elif axis is None:
            return ("alone", id(firing))
        else:
            parts.append((name, value.dtype, axis))
    return (*parts, firing.given.dim() if firing.given is not None else 0)
