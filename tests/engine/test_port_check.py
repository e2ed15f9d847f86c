"""Outputs that differ from a node's ports: each ends its own request, with node, port, expected and found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import LoopSpec
from mstar_core.engine.port_check import PortCheck, fits
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import STATELESS, Attend, NodeSpec, PortType
from tests.engine.tiny_engine import LM, Driver, TinyLM, make_engine, prompt

CODEC = NodeSpec(
    name="codec",
    engine=STATELESS,
    ports={"ids": "i64[n]", "pcm": "i16[samples]", "level": "f32[2]", "preview": "u8[h]?"},
)
SOUND = torch.zeros((3, 8), dtype=torch.int16)


@pytest.mark.parametrize(
    ("wanted", "outputs", "told"),
    [
        (("pcm",), {}, "codec returned no 'pcm', which its walk takes"),
        (("pcm",), {"pmc": SOUND}, "return 'pmc' as 'pcm'"),
        (("preview",), {"previw": SOUND, "pcm": SOUND}, "return 'previw' as 'preview'"),
        (("pcm",), {"pcm": SOUND.float()}, "codec returned 'pcm' as f32[3,8]; declared is i16[samples]"),
        (("pcm",), {"pcm": [SOUND[0], SOUND[0].int()]}, "'pcm' as i32[8]; declared is i16[samples]"),
        (("pcm",), {"pcm": SOUND[..., None].repeat(1, 1, 2)}, "'pcm' as i16[3,8,2]"),
        (("pcm",), {"pcm": SOUND, "level": torch.zeros(3, 4)}, "'level' as f32[3,4]; declared is f32[2]"),
        (("level",), {"level": torch.zeros(3, 2, dtype=torch.int32)}, "'level' as i32[3,2]; declared is f32[2]"),
        (("pcm",), {"pcm": 3}, "'pcm' as int, not as a tensor"),
    ],
)
def test_a_fault_names_node_port_expected_and_found(wanted: tuple[str, ...], outputs: Any, told: str) -> None:
    check = PortCheck(CODEC)
    for _ in range(2):  # a fault is not remembered as passed
        with pytest.raises(EngineError) as raised:
            check.require(wanted, tuple(outputs), outputs)
        assert told in f"{raised.value.title} {raised.value.hint}" and "codec" in raised.value.title


@pytest.mark.parametrize(
    ("wanted", "outputs"),
    [
        (("pcm",), {"pcm": SOUND}),
        (("pcm", "preview"), {"pcm": SOUND}),
        (("pcm",), {"pcm": [SOUND[0], None, SOUND[1][:3]]}),
        (("pcm",), {"pcm": [None, None]}),
        (("level",), {"level": torch.zeros(3, 2, dtype=torch.bfloat16)}),
        (("pcm",), {"pcm": SOUND, "more": SOUND}),
    ],
)
def test_what_fits_its_ports_passes(wanted: tuple[str, ...], outputs: dict[str, Any]) -> None:
    PortCheck(CODEC).require(wanted, tuple(outputs), outputs)


def test_the_precision_of_the_deployment_fits_a_float_port_at_run_time_only() -> None:
    value = torch.zeros(2, dtype=torch.bfloat16)
    assert fits(PortType.parse("f32[2]"), value, 0, any_float=True)
    assert not fits(PortType.parse("f32[2]"), value, 0)


class Forgetful(TinyLM):
    """Returns `velocity` under a mistyped name."""

    def forward(self, *args: Any, **ports: Any) -> dict[str, Tensor]:
        outputs = super().forward(*args, **ports)
        outputs["velocty"] = outputs.pop("velocity")
        return outputs


NODE = replace(LM, ports={**LM.ports, "velocity": "f32[n,32]"})


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_pass_without_a_wanted_port_ends_its_request_alone(lookahead: int) -> None:
    driver = Driver(make_engine(spec=NODE, module=Forgetful(), lookahead=lookahead), lookahead)
    for handle in (0, 1):
        driver.open(handle)
    bad = driver.prefill(0, prompt(1, 9), outputs=("token", "velocity"))
    good, loop = driver.prefill(1, prompt(2, 7)), driver.decode(1, 4)
    driver.run()
    assert "LM returned no 'velocity'" in driver.failed[bad].error.title
    assert driver.failed[bad].error.hint == "return 'velocty' as 'velocity'"
    assert good in driver.done and loop in driver.done and len(driver.ids[loop]) == 4
    driver.engine.close(0)  # type: ignore[arg-type]
    driver.engine.close(1)  # type: ignore[arg-type]
    assert driver.engine.memory().pages_used == 0


def test_a_decoding_sequence_without_its_emitted_port_ends_alone_in_its_batch() -> None:
    driver = Driver(make_engine(spec=NODE, module=Forgetful()))
    for handle in (0, 1):
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 5))
    loop = LoopSpec(max_iters=4, carry={"token": "token"}, stop_port="token", emit=("velocity",))
    bad, good = driver.submit(0, loop=loop, outputs=("token",)), driver.decode(1, 4)
    driver.run()
    assert "expected 'velocity' f32[n,32]" in str(driver.failed[bad].error.detail)
    assert good in driver.done and len(driver.ids[good]) == 4 and bad not in driver.emissions


def test_a_loop_without_its_carried_port_ends_with_what_the_module_returned() -> None:
    driver = Driver(make_engine(spec=NODE, module=Forgetful()))
    driver.open(0)
    loop = LoopSpec(max_iters=3, carry={"velocity": "latents"}, fused=True)
    key = driver.submit(0, inputs={"latents": torch.zeros(4, 32)}, loop=loop, attend=Attend(mask="full", write=False))
    driver.run()
    assert "module returned hidden, latents_out, velocty" in str(driver.failed[key].error.detail)
