"""The reference's requests through the whole runtime: processor, program, scheduler, engines, branches and loops."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mstar_bagel.graph import MARKERS
from mstar_bagel.nodes.language import BagelLLM
from mstar_bagel.processor import Processor
from mstar_bagel.request.schedule import flow_times
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import BuiltNode, RuntimeSettings, build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin.processor import MediaPart
from mstar_core.worker.start.warmup import warm_walks

LATENTS = 2e-4
PICTURE = ("image", "text")


class Scripted(nn.Module):
    """The language model with given ids in place of drawn ones: the reference's thought is not its own."""

    def __init__(self, inner: BagelLLM, script: Sequence[int]) -> None:
        super().__init__()
        self.inner = inner
        self.left = list(script)

    def forward(self, **ports: Any) -> Any:
        return self.inner(**ports)

    def head(self, hidden: Tensor) -> Tensor:
        logits = self.inner.head(hidden)
        if self.left and len(hidden) == 1:
            logits = torch.zeros_like(logits)
            logits[0, self.left.pop(0)] = 1.0
        return logits


class Recorded(nn.Module):
    """The image decoder, with the latents that it got."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[Tensor] = []

    def forward(self, *, latents: Sequence[Tensor]) -> Any:
        self.seen += [latent.clone() for latent in latents]
        return self.inner(latents=latents)


@pytest.fixture(scope="module")
def nodes(reference: Any) -> dict[str, BuiltNode]:
    return build_nodes(reference.spec, reference.folder)


@pytest.fixture
def recorded(nodes: dict[str, BuiltNode]) -> tuple[dict[str, BuiltNode], Recorded]:
    decoder = Recorded(nodes["vae_decoder"].module)
    return nodes | {"vae_decoder": replace(nodes["vae_decoder"], module=decoder)}, decoder


def media_of(golden: Any, parts: Sequence[tuple[str, str]]) -> tuple[list[MediaPart], list[tuple[str, int]], list[str]]:
    """Return files, order and texts of a prompt."""
    files, order, texts = [], [], list[str]()
    for kind, value in parts:
        if kind == "image":
            order.append(("image", len(files)))
            files.append(MediaPart(modality="image", data=golden.png(value), name=value))
        else:
            order.append(("text", len(texts)))
            texts.append(value)
    return files, order, texts


class Texts:
    """The processor with several texts in a request, which the in-process client cannot send. Keyed by its text."""

    def __init__(self, inner: Any, texts: Mapping[str, Sequence[str]]) -> None:
        self.inner = inner
        self.texts = texts
        self.detokenizer = inner.detokenizer
        self.postprocess = inner.postprocess

    def process_prompt(self, request: Any) -> Any:
        return self.inner.process_prompt(replace(request, texts=self.texts[request.text]))


def painted(golden: Any, name: str) -> tuple[SampleRequest, list[str]]:
    """Return the request of a generation case, and its texts."""
    case = golden.cases[name]
    files, order, texts = media_of(golden, golden.prompt(name))
    params = dict(case["params"])
    if not files:
        params |= {"height": case["output_hw"][0], "width": case["output_hw"][1]}
    if "think_text" in case:
        params["think_mode"] = True
    outputs = ("text", "image") if "think_text" in case else ("image",)
    made = SampleRequest(
        text=name, media=files, order=order, params=params, outputs=outputs, seed=case["noise_seed"], name=name
    )
    return made, texts


def runtime(golden: Any, reference: Any, built: Any, ranks: int = 1, **settings: Any) -> LocalRuntime:
    texts = {name: painted(golden, name)[1] for name in golden.paintings}
    texts |= {name: [case["prompt"]] for name, case in golden.cases["understanding"].items()}
    texts["chat"] = [golden.cases["chat"]["prompt"]]
    processor: Any = Texts(Processor(reference.folder, {}), texts)
    return LocalRuntime(
        reference.spec, reference.folder, RuntimeSettings(**settings), ranks=ranks, built=built, processor=processor
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_image_equals_the_reference(painting: str, ranks: int, golden: Any, reference: Any, recorded: Any) -> None:
    built, decoder = recorded
    case, expected = golden.cases[painting], golden.tensors(painting)
    ids = [*golden.cases["tokens"][case["think_text"]], reference.sizes.ids.end] if "think_text" in case else []
    llm = Scripted(built["LLM"].module, ids)
    served = runtime(golden, reference, built | {"LLM": replace(built["LLM"], module=llm)}, ranks)
    request, _ = painted(golden, painting)
    (outcome,) = served.ask(request)
    assert outcome.status == "finished", outcome.cause
    torch.testing.assert_close(decoder.seen[0].flatten(0, 1), expected["final_latents"], atol=LATENTS, rtol=0)
    (image,) = outcome.of("image")
    assert list(image.shape) == [*case["output_hw"], 3]
    if golden.has_decoder:
        apart = np.abs(image.astype(int) - expected["pixels_uint8"].numpy())
        assert apart.max() <= 1 and np.count_nonzero(apart) <= 0.005 * apart.size
    if ids:
        assert outcome.outputs["text"].decode() == case["think_text"]
    assert outcome.counts["denoise"] == len(expected["t"])
    assert served.leaks() == []


def test_all_images_at_once_equal_the_reference(golden: Any, reference: Any, recorded: Any) -> None:
    """Requests of different sizes, prompts, guidance and steps share passes, and their results do not change."""
    built, decoder = recorded
    names = [name for name in golden.paintings if "think_text" not in golden.cases[name]]
    served = runtime(golden, reference, built)
    outcomes = served.ask(*(painted(golden, name)[0] for name in names))
    assert [outcome.status for outcome in outcomes] == ["finished"] * len(names)
    for name in names:
        expected = golden.tensors(name)["final_latents"]
        same = [each.flatten(0, 1) for each in decoder.seen if each.flatten(0, 1).shape == expected.shape]
        assert min(float((each - expected).abs().max()) for each in same) <= LATENTS, name
    assert served.leaks() == []


def test_answers_equal_the_reference_together_and_alone(golden: Any, reference: Any, nodes: Any) -> None:
    asked = {name: (golden.cases["understanding"][name]["images"], name) for name in golden.cases["understanding"]}
    asked["chat"] = ([], "chat")
    expected = {name: golden.cases["understanding"][name]["tokens"] for name in golden.cases["understanding"]}
    expected["chat"] = golden.cases["chat"]["tokens"]
    requests = []
    for name, (images, text) in asked.items():
        files, order, _ = media_of(golden, [*(("image", image) for image in images), ("text", text)])
        params = {"max_output_tokens": len(expected[name])}
        requests.append(SampleRequest(text=text, media=files, order=order, params=params, outputs=("text",)))
    for group in (requests, *([request] for request in requests)):
        served = runtime(golden, reference, nodes)
        for request, outcome in zip(group, served.ask(*group), strict=True):
            assert [int(value.item()) for value in outcome.of("token")] == expected[str(request.text)]
            assert outcome.reason == "length"
        assert served.leaks() == []


# -- the tiny checkpoint -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tiny_folder: Any) -> Any:
    from .conftest import SPEC

    spec = SPEC.bound(tiny_folder, {})
    built = build_nodes(spec, tiny_folder)

    def make(**settings: Any) -> LocalRuntime:
        return LocalRuntime(spec, tiny_folder, RuntimeSettings(**settings), built=built)

    return make


PAINT = {"width": 64, "height": 32, "num_timesteps": 4}


def ask(text: str = "a red boat", **params: Any) -> SampleRequest:
    return SampleRequest(text=text, params={**PAINT, **params}, outputs=("image", "text"))


def test_a_thought_is_cut_by_its_limit_or_closed_by_its_own_token(small: Any) -> None:
    whole = small().ask(ask(think_mode=True))[0]
    limit = whole.counts["decode_loop"] - 4
    cut = small().ask(ask(think_mode=True, max_think_tokens=limit))[0]
    assert (whole.status, cut.status) == ("finished", "finished")
    assert cut.counts["decode_loop"] == limit < whole.counts["decode_loop"]
    assert whole.outputs["text"].startswith(cut.outputs["text"])
    assert cut.outputs["image"] != whole.outputs["image"] != small().ask(ask())[0].outputs["image"]


def test_guidance_on_off_and_its_interval_change_the_image(small: Any) -> None:
    variants = [{}, {"cfg_text_scale": 1.0}, {"cfg_interval": [0.8, 1.0]}, {"cfg_img_scale": 1.5}]
    images = [small().ask(ask(**variant))[0].outputs["image"] for variant in variants]
    assert len(set(images)) == len(variants)


def test_branches_outside_the_interval_cost_no_pass(small: Any) -> None:
    counts = {}
    for name, params in {"guided": {}, "partly": {"cfg_interval": [0.8, 1.0]}, "plain": {"cfg_text_scale": 1}}.items():
        served = small()
        steps = count_passes(served)
        served.ask(ask(num_timesteps=6, timestep_shift=1.0, **params))
        counts[name] = sum(steps)
    # t = 1.0, 0.8, 0.6, 0.4, 0.2: the defaults guide above 0.4, the second request 1.0 alone.
    assert counts == {"guided": 3 + 5, "partly": 1 + 5, "plain": 5}


def test_partial_images_come_nearer_to_the_image_and_do_not_change_it(small: Any) -> None:
    (plain,) = small().ask(ask(num_timesteps=9))
    served = small()
    request = replace(ask(num_timesteps=9, partial_images=3), outputs=("image", "text", "partial_image"))
    passes = count_passes(served)
    (told,) = served.ask(request)
    assert told.status == "finished", told.cause
    (expected,), partial = plain.of("image"), told.of("image")
    *partial, last = partial
    assert np.array_equal(last, expected)
    apart = [float(np.abs(each.astype(int) - expected.astype(int)).mean()) for each in partial]
    assert len(apart) == 3 and apart == sorted(apart, reverse=True) and 0 < apart[-1] < apart[0]
    assert sum(passes) == sum(1 + int(0.4 < t) for t in flow_times(9, 3.0)[:-1]), "they cost no pass"
    assert served.leaks() == []


def test_a_thought_that_is_cancelled_frees_everything(small: Any) -> None:
    served = small()
    call = served.send(ask(think_mode=True, ignore_eos=True, max_think_tokens=200))
    for _ in range(60):
        assert served.step()
    served.cancel(call)
    served.run()
    assert call.outcome is not None and call.outcome.status == "cancelled"
    assert served.leaks() == []


@pytest.mark.parametrize("node", ["LLM", "vae_decoder"])
def test_a_pass_out_of_memory_ends_its_request_alone(node: str, small: Any) -> None:
    """The allocator fails where CUDA raises: in the forward pass of a large image, also beside a small one."""
    served = small()
    (runner,) = [runner for worker in served.workers for name, runner in worker.runners.items() if name == node]
    owner = runner._runner if node == "LLM" else runner
    module = owner._module

    def short(**ports: Any) -> Any:
        if any(each.shape[0] * each.shape[1] > 6 for each in ports.get("latents", ())):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 3.20 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
                "1.10 GiB is free."
            )
        return module(**ports)

    short.head = getattr(module, "head", None)  # type: ignore[attr-defined]
    owner._module = short
    large, other = served.ask(ask(width=64, height=64), ask(width=32, height=32))
    assert (large.status, other.status) == ("failed", "finished")
    assert large.cause.startswith(f"node {node} ran out of memory on its device: 3.20 GiB requested, 1.10 GiB free")
    assert served.leaks() == []
    assert served.ask(ask(width=32, height=32))[0].outputs["image"] == other.outputs["image"]


def count_passes(served: LocalRuntime) -> list[int]:
    """Return a list that grows by the images of each denoising pass."""
    found: list[int] = []
    (llm,) = [runner for worker in served.workers for name, runner in worker.runners.items() if name == "LLM"]
    module = llm._runner._module  # type: ignore[attr-defined]

    def counted(**ports: Any) -> Any:
        if "latents" in ports:
            found.append(len(ports["latents"]))
        return module(**ports)

    counted.head = module.head  # type: ignore[attr-defined]
    llm._runner._module = counted  # type: ignore[attr-defined]
    return found


def test_the_first_of_many_answers_about_images_does_not_wait_for_all_images(small: Any) -> None:
    actual = io.BytesIO()
    Image.new("RGB", (75, 52), "red").save(actual, "PNG")
    file = MediaPart(modality="image", data=actual.getvalue(), name="a")
    asked = [
        SampleRequest(text=f"what is it, {number}?", media=[file], params={"max_output_tokens": 4}, outputs=("text",))
        for number in range(8)
    ]
    whole = image_tokens(small(token_budget=2048), asked)
    assert whole[0] > 0 and not any(whole[1:]), "small images share one pass"
    passes = image_tokens(small(token_budget=32), asked)
    assert sum(passes) == whole[0] and max(passes) <= 2 * 32
    last = max(number for number, tokens in enumerate(passes) if tokens)
    assert 0 in passes[:last], "text runs between the images"


def image_tokens(served: LocalRuntime, asked: Sequence[SampleRequest]) -> list[int]:
    """Return the tokens of images of each forward pass of the language model for these requests; 0 for text."""
    (llm,) = [runner for worker in served.workers for name, runner in worker.runners.items() if name == "LLM"]
    module, found = llm._runner._module, list[int]()  # type: ignore[attr-defined]

    def counted(**ports: Any) -> Any:
        found.append(sum(len(each) + MARKERS for each in ports.get("embeds", ())))
        return module(**ports)

    counted.head = module.head  # type: ignore[attr-defined]
    llm._runner._module = counted  # type: ignore[attr-defined]
    assert all(outcome.status == "finished" for outcome in served.ask(*asked))
    return found


def test_seeds_decide_the_image_and_company_does_not(small: Any) -> None:
    alone = [small().ask(replace(ask(), seed=seed))[0].of("image")[0] for seed in (1, 2, 1)]
    together = [each.of("image")[0] for each in small().ask(*(replace(ask(), seed=seed) for seed in (1, 2, 1)))]
    assert all(apart(one, other) <= 1 for one, other in zip(alone, together, strict=True))
    assert apart(alone[0], alone[2]) == 0 and apart(alone[0], alone[1]) > 1


def apart(first: np.ndarray, second: np.ndarray) -> int:
    """Return the largest difference of two images in steps of 8 bits. Products of other sizes may round differently."""
    return int(np.abs(first.astype(int) - second.astype(int)).max())


def test_a_cancel_in_the_middle_of_an_image_frees_everything_within_a_step(small: Any) -> None:
    served = small()
    calls = [served.send(ask(num_timesteps=40)), served.send(ask("a blue boat", num_timesteps=40))]
    passes = count_passes(served)
    while len(passes) < 20:
        assert served.step()
    served.cancel(calls[0])
    before, held = len(passes), pages(served)
    while calls[0].outcome is None:
        assert served.step()
    served.step()
    assert len(passes) <= before + 2 and pages(served) < held, "the steps in flight at most"
    assert calls[0].outcome.status == "cancelled" and calls[1].outcome is None
    served.run()
    assert max(passes[:before]) == 4 and max(passes[before + 2 :]) == 2, "both branches of one image"
    assert calls[1].outcome is not None and calls[1].outcome.status == "finished"
    assert served.leaks() == []


def pages(served: LocalRuntime) -> int:
    """Return the pages in use of the language model."""
    (llm,) = [runner for worker in served.workers for name, runner in worker.runners.items() if name == "LLM"]
    return int(llm.memory().pages_used)


def test_the_warm_up_runs_every_sample_of_the_checkpoint(small: Any, caplog: pytest.LogCaptureFixture) -> None:
    served = small(slots=4)
    (worker,) = served.workers
    reported: list[str] = []
    names = {"LLM", "vit_encoder", "vae_encoder", "vae_decoder", "combine_cfg"}
    with caplog.at_level("WARNING"):
        warm_walks(served.api._spec, 0, worker.runners, names, 1024, reported.append)
    assert "paint" in reported and "edit" in reported
    assert caplog.messages == []
    assert served.leaks() == []
