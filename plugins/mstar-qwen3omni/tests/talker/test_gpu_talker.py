"""The talker's kernels and captured steps on CUDA: against float32, against eager runs, alone and in batches."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mstar_core.engine.device import prepare_device
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import Rotary
from mstar_core.layers.code_predictor import CodePredictor, _Frame
from mstar_core.layers.linear import fuse_projections
from mstar_qwen3omni.checkpoint.config import DecoderSizes, OmniConfig, TextIds
from mstar_qwen3omni.params import VOICES
from mstar_qwen3omni.talker.talker import Talker, predictor_spec
from mstar_qwen3omni.thinker.thinker import rotary_spec

from .driver import CASES, FOLDER, Case, load_talker, read_case
from .test_talker_engine import Wish, answers, make_engine, run

pytestmark = pytest.mark.gpu

SIZES = DecoderSizes(vocab=2048, width=256, layers=3, heads=4, kv_heads=2, head_dim=128, mlp=512)
GROUPS = 16
TALKER = DecoderSizes(
    vocab=3072,
    width=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=128,
    mlp=128,
    experts=16,
    experts_per_token=4,
    shared_mlp=256,
    mrope=(24, 20, 20),
)
CONFIG = OmniConfig(
    talker=TALKER,
    thinker=replace(TALKER, vocab=200),
    predictor=SIZES,
    ids=TextIds(im_start=160, assistant=161, tts_pad=150, tts_bos=151, tts_eos=152),
    groups=GROUPS,
    projection=256,
)


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    device = torch.device("cuda", 0)
    prepare_device(device)
    return device


@pytest.fixture(scope="module")
def pair(cuda: torch.device) -> tuple[CodePredictor, CodePredictor]:
    """A predictor in bfloat16 with fused weights on the GPU, and the same weights in float32 on the CPU."""
    torch.manual_seed(2)
    made = CodePredictor(predictor_spec(SIZES, GROUPS)).requires_grad_(False).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.1)
    half = copy.deepcopy(made).to(cuda, torch.bfloat16)
    half.model.rotation = made.model.rotation.to(cuda)
    fuse_projections(half)
    return half, copy.deepcopy(half).cpu().float()


def inputs(cuda: torch.device, rows: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    states, first = torch.randn(2, rows, SIZES.width, generator=generator).to(cuda, torch.bfloat16).unbind()
    uniform = torch.rand(rows, GROUPS - 1, generator=generator)
    rule = (torch.ones(rows), torch.full((rows,), 50), torch.full((rows,), 0.8))
    return (states, first, *(each.to(cuda) for each in (uniform, *rule)))


def logits_of(predictor: CodePredictor, states: Tensor, first: Tensor, codes: Tensor) -> Tensor:
    """Return the logits of every step for given codes: float32 [B, groups - 1, vocab] on the CPU."""
    found: list[Tensor] = []

    def choose(step: int, logits: Tensor) -> Tensor:
        found.append(logits.float().cpu())
        return codes[:, step].to(logits.device)

    predictor.unroll(states, first, choose)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("rows", [1, 3, 32, 40])
def test_logits_in_half_precision_are_near_float32(
    cuda: torch.device, pair: tuple[CodePredictor, CodePredictor], rows: int
) -> None:
    half, wide = pair
    states, first, *_ = inputs(cuda, rows)
    assert _Frame(half, rows, states)._kernels is not None
    codes = torch.randint(0, SIZES.vocab, (rows, GROUPS - 1), generator=torch.Generator().manual_seed(1))
    actual = logits_of(half, states, first, codes)
    expected = logits_of(wide, states.float().cpu(), first.float().cpu(), codes)
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 0.04, float(error.max())


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_captured_frame_equals_an_eager_one(
    cuda: torch.device, pair: tuple[CodePredictor, CodePredictor], rows: int
) -> None:
    half, given = pair[0], inputs(cuda, rows)
    eager = half.predict(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = half.predict(*given)
    graph.replay()
    assert torch.equal(drawn, eager)
    given[2].copy_(torch.rand(given[2].shape, generator=torch.Generator().manual_seed(8)))
    graph.replay()
    assert torch.equal(drawn, half.predict(*given)) and not torch.equal(drawn, eager)


def test_a_frame_does_not_depend_on_its_batch(cuda: torch.device, pair: tuple[CodePredictor, CodePredictor]) -> None:
    half, given = pair[0], inputs(cuda, 24)
    together = half.predict(*given)
    for row in (0, 7, 23):
        assert torch.equal(half.predict(*(each[row : row + 1].contiguous() for each in given))[0], together[row])


def made_talker(device: torch.device, dtype: torch.dtype) -> Talker:
    """A small talker of random weights with heads of 128."""
    torch.manual_seed(6)
    talker = Talker(CONFIG).requires_grad_(False).eval().to(dtype)
    talker.model.rotary = Rotary(rotary_spec(CONFIG.talker))
    talker.code_predictor.model.rotation = CodePredictor(predictor_spec(SIZES, GROUPS)).model.rotation
    talker.to(device)
    fuse_projections(talker)
    return talker


def wish(row: int) -> Wish:
    """A request of text alone, with drawn codes."""
    generator = torch.Generator().manual_seed(row)
    ids = torch.randint(0, 150, (6 + 5 * row,), generator=generator)
    tensors = {
        "in.input_ids": ids,
        "talker_input_ids": torch.cat([ids, torch.full((9,), CONFIG.ids.tts_pad)]),
        "talker_position_ids": torch.arange(len(ids) + 9.0).expand(3, -1),
        "thinker_tokens": torch.randint(0, 150, (4 + row,), generator=generator),
    }
    params = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=row)
    return Wish(Case("made", CONFIG, tensors), 9 + row, row % len(VOICES), params, heat=1.0)


@pytest.fixture(scope="module")
def small(config: OmniConfig) -> Talker:
    """The talker of the set on the GPU, in float32."""
    return load_talker(FOLDER, torch.device("cuda", 0))


def test_greedy_answers_on_cuda_equal_the_reference(cuda: torch.device, small: Talker, config: OmniConfig) -> None:
    for name in CASES:
        case = read_case(name, config)
        (actual,) = answers(small, [Wish(case, len(case.tensors["talker_tokens"]))], device=cuda)
        assert actual.tokens == case.tensors["talker_tokens"].tolist()
        assert torch.equal(torch.tensor(actual.frames).T, case.tensors["codes"])


def test_captured_answers_equal_eager_ones(cuda: torch.device) -> None:
    """Drawn codes of unequal lengths, in float32: in bfloat16 eager steps and captured ones round apart."""
    talker, wishes = made_talker(cuda, torch.float32), [wish(row) for row in range(5)]
    settings = {"device": cuda, "attention": "torch", "page_size": 16, "lookahead": 1}
    plain = answers(talker, wishes, **settings)
    captured, driver = run(talker, wishes, graphs=(1, 2, 8), **settings)
    assert captured == plain and driver.engine.graph_counts is not None and driver.engine.graph_counts.hits > 5
    assert [answers(talker, [wish], graphs=(1,), **settings)[0] for wish in wishes] == plain


def test_captured_prompt_passes_give_the_answers_of_eager_ones(cuda: torch.device, config: OmniConfig) -> None:
    talker = load_talker(FOLDER, cuda)
    cases = [read_case(name, config) for name in CASES]
    wishes = [Wish(case, len(case.tensors["talker_tokens"])) for case in cases]
    settings = {"device": cuda, "attention": "torch", "lookahead": 1, "graphs": (8,)}
    engine = make_engine(talker, wishes, **settings)
    first, _ = run(talker, wishes, lookahead=1, engine=engine)
    while engine.idle():
        pass
    before = engine.counters()["prefill_hits"]
    again, _ = run(talker, wishes, lookahead=1, engine=engine)
    assert again == first and engine.counters()["prefill_hits"] > before
    assert [each.tokens for each in again] == [case.tensors["talker_tokens"].tolist() for case in cases]


def test_captured_answers_of_a_batch_stay_apart(cuda: torch.device) -> None:
    """In another order each request has other rows and pages, and the same answer, in bfloat16 too."""
    talker, wishes = made_talker(cuda, torch.bfloat16), [wish(row) for row in range(5)]
    settings = {
        "device": cuda,
        "dtype": torch.bfloat16,
        "attention": "flashinfer",
        "page_size": 16,
        "lookahead": 1,
        "graphs": (8,),
    }
    together = answers(talker, wishes, **settings)
    order = [3, 0, 4, 2, 1]
    again = answers(talker, [wishes[index] for index in order], **settings)
    assert again == [together[index] for index in order] and len({str(each) for each in together}) == len(wishes)
