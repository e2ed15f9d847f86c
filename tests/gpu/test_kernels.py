"""Every kernel of the core once, at small and odd sizes: what `make sanitize` watches for accesses out of bounds.

Values are looked at elsewhere, against references; here each result need only be finite and in range.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mstar_core.engine import rng, sampler
from mstar_core.layers.packing import pack
from tests.engine.tiny_engine import generate, prompt
from tests.gpu.kernels import launched
from tests.gpu.test_engine import SAMPLINGS, WideLM, wide_engine

pytestmark = pytest.mark.gpu
RAN: set[str] = set()


def draws(cuda: torch.device, rows: int, vocab: int) -> None:
    """The sampler alone."""
    from mstar_core.engine.nucleus import NucleusSampler

    params = [SAMPLINGS[row % len(SAMPLINGS)] for row in range(rows)]
    settings = sampler.SamplingRows.of(params, cuda)
    seen = torch.zeros(rows + 1, vocab, dtype=torch.bool, device=cuda)
    seen[:, ::3] = True
    ids = NucleusSampler(rows, vocab, cuda).draw(
        torch.randn(rows, vocab, device=cuda) * 3, seen=seen, slots=torch.arange(1, rows + 1, device=cuda),
        penalty=settings.penalty[:, 0].contiguous(), temperature=settings.temperature[:, 0].contiguous(),
        top_p=settings.top_p[:, 0].contiguous(), greedy=settings.greedy,
        chance=rng.uniform_of(settings.state, torch.arange(rows, device=cuda)),
    ).tolist()  # fmt: skip
    assert all(0 <= drawn < vocab for drawn in ids), ids


def steps(cuda: torch.device, count: int, graphs: tuple[int, ...]) -> None:
    """A language model from prompts of odd lengths to odd ends: layers, pages, attention, sampling."""
    module = WideLM(vocab=1001).to(cuda, torch.bfloat16)
    pack(module)
    engine = wide_engine(cuda, module, vocab=1001, graphs=graphs, num_pages=64, token_budget=48)
    rows = [(prompt(seed, 1 + 17 * seed), 5 + seed, SAMPLINGS[seed % len(SAMPLINGS)]) for seed in range(count)]
    for request, ids in zip(rows, generate(rows, lookahead=1, engine=engine), strict=True):
        assert len(ids) == request[1] + 1 and all(0 <= drawn < 1001 for drawn in ids)


CASES: dict[str, Callable[[torch.device], None]] = {
    "draws-1": lambda cuda: draws(cuda, 1, 53),
    "draws-3": lambda cuda: draws(cuda, 3, 4099),
    "draws-17": lambda cuda: draws(cuda, 17, 1000),
    "steps-plain": lambda cuda: steps(cuda, 5, ()),
    "steps-captured": lambda cuda: steps(cuda, 5, (1, 8)),
}


def run(name: str, cuda: torch.device) -> None:
    with torch.inference_mode():
        CASES[name](cuda)
        torch.cuda.synchronize()
    RAN.add(name)


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str, cuda: torch.device) -> None:
    run(name, cuda)


def test_kernels_are_all_run_here(cuda: torch.device) -> None:
    """A kernel that is new has to be reached by a case above: else nobody looks for its errors."""
    for name in CASES.keys() - RAN:
        run(name, cuda)
    found = launched("mstar_core.engine", "mstar_core.layers")
    assert found and all(found.values()), {name for name, has_run in found.items() if not has_run}
