"""The node `LLM`: the language model prefills the prefix, the action expert runs the flow from noise to
actions.

Run by the KV engine. Passes take packed tokens of any number of requests: prefixes of different lengths share a pass,
and so do flow steps of requests at different steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from mstar_core.engine.module import NodeModule
from mstar_core.layers import Rotary, RotarySpec
from mstar_core.parallel.shards import WHOLE, Shard
from mstar_pi05.checkpoint.config import ACTION_WIDTH
from mstar_pi05.nodes.expert import Expert, Modulation
from mstar_pi05.nodes.flow import TimeMLP, TimeTable, distinct_times
from mstar_pi05.nodes.gemma import Language
from mstar_pi05.nodes.warm_up import of_policy

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.module import WarmupRequest
    from mstar_core.layers.kv_view import KVView
    from mstar_pi05.checkpoint.config import Sizes


class Policy(nn.Module, NodeModule):
    """Both transformers over one cache. action_dim: values per action of the robot.

    expected_steps: numbers of flow steps that are warmed up.
    """

    host_outputs = ("robot_actions",)
    rounds_inputs = True
    # Its products have few rows, for which the kernels of half precision are faster.
    unquantized = ("expert",)

    def __init__(self, sizes: Sizes, action_dim: int = ACTION_WIDTH, shard: Shard = WHOLE) -> None:
        super().__init__()
        width = sizes.expert.width
        self.language = Language(sizes, shard)
        self.expert = Expert(sizes, shard)
        self.time = TimeMLP(width, sizes.min_period, sizes.max_period)
        # float32: these layers are small, and their outputs accumulate over all steps.
        self.action_in_proj = nn.Linear(ACTION_WIDTH, width, dtype=torch.float32)
        self.action_out_proj = nn.Linear(width, ACTION_WIDTH, dtype=torch.float32)
        self.rotary = Rotary(RotarySpec(width=sizes.language.head_dim, base=sizes.rope_base))
        self.table: TimeTable | None = None
        self.action_dim = action_dim
        self.expected_steps: tuple[int, ...] = ()
        self._sizes = sizes

    def forward(
        self,
        *,
        kv: KVView,
        positions: Tensor,
        tokens: Tensor | None = None,
        embeds: Tensor | None = None,
        actions: Tensor | None = None,
        scale: Tensor | None = None,
        offset: Tensor | None = None,
        step: Tensor | None = None,
        num_steps: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run a prefill pass (tokens, embeds), or one flow step (all other ports).

        T packed tokens: tokens int64 [T], IMAGE at the camera vectors in embeds [T, width]; actions, scale and offset
        float32 [T, 32]; step and num_steps int64 [T]. A prefill returns nothing. A step returns `actions` [T, 32] for
        the next one, and `robot_actions` [T, action_dim] = actions * scale + offset.
        """
        if tokens is not None:
            assert embeds is not None, "the graph sends both"
            x = self.language.embed(tokens, embeds)
            self.language.read(x, kv, self.rotary(positions))
            return {}
        assert actions is not None and scale is not None and offset is not None, "the graph sends all of them"
        assert step is not None and num_steps is not None and self.table is not None, "tables are made with the weights"
        if actions.is_cuda:
            inputs = {"actions": actions, "scale": scale, "offset": offset, "step": step, "num_steps": num_steps}
            moved, robot = self._fused_step(kv, positions, inputs)
        else:
            velocity = self.velocity(kv, positions, actions, self.table.at(num_steps, step))
            moved = torch.addcmul(actions, velocity, -1.0 / num_steps.float()[:, None])
            robot = torch.addcmul(offset, moved, scale)
        return {"actions": moved, "robot_actions": robot[:, : self.action_dim]}

    def _fused_step(self, kv: KVView, positions: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Run a flow step with fused kernels for embedding and head. tensors: the ports of a step."""
        assert self.table is not None, "tables are made with the weights"
        dtype, kernels = (
            self.language.embed_tokens.weight.dtype,
            importlib.import_module("mstar_pi05.kernels.embed_head"),
        )
        weights = kernels.StepWeights(
            into=self.action_in_proj,
            out_of=self.action_out_proj,
            table=self.table,
            frequencies=self.rotary.frequencies,
            eps=self.expert.norm.eps,
            dtype=dtype,
        )
        inputs = kernels.StepInputs(**tensors)
        start = kernels.embed(weights, inputs, positions)
        modulation = Modulation(self.table, start.rows, dtype)
        x, branch = self.expert.between(start.x, start.normed, modulation, kv, start.rotation)
        both: tuple[Tensor, Tensor] = kernels.head(weights, inputs, start.rows, x, branch)
        return both

    def velocity(self, kv: KVView, positions: Tensor, actions: Tensor, rows: Tensor) -> Tensor:
        """Return the velocity of the flow, float32 [T, 32]. rows: int64 [T], rows of the time table."""
        velocity: Tensor = self.action_out_proj(self.suffix_hidden(kv, positions, actions, rows))
        return velocity

    def suffix_hidden(self, kv: KVView, positions: Tensor, actions: Tensor, rows: Tensor) -> Tensor:
        """Return the final hidden states of the action tokens: float32 [T, width]."""
        assert self.table is not None, "tables are made with the weights"
        modulation = Modulation(self.table, rows, self.language.embed_tokens.weight.dtype)
        hidden: Tensor = self.expert(self.action_in_proj(actions), modulation, kv, self.rotary(positions))
        return hidden

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """See NodeModule. Returns flows of the expected numbers of steps."""
        return of_policy(self._sizes, self.expected_steps)

    def tabulate(self, times: Tensor, rows: Tensor) -> None:
        """Compute the table of these times, float32 [times]. rows: see `TimeTable`."""
        self.table = TimeTable(self.expert.modulations(self.time(times)), rows)

    def settle(self, most_steps: int) -> None:
        """Compute the table of all flows of up to `most_steps` steps, and free the layers that it replaces."""
        device = self.action_in_proj.weight.device
        times, rows = (value.to(device) for value in distinct_times(most_steps))
        with torch.no_grad():
            self.tabulate(times, rows)
        self.expert.forget_dense()
