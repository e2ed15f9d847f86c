"""The commands of `train/`: made questions, the tokenizer, and a short training whose checkpoint the plugin reads."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import torch
import transformers

from mstar_core.plugin.chat.parser import AnswerParser
from mstar_core.plugin.chat.parts import CallArguments, CallBegin
from mstar_llm.checkpoint.config import read_config
from mstar_llm.plugin import bind, llm
from mstar_llm.processor import Processor
from mstar_llm.sources.download import checked

PLUGIN = Path(__file__).parents[1]


def train(module: str) -> ModuleType:
    """Import a module of `train/` under a name that no other plugin uses."""
    if "llm_train" not in sys.modules:
        folder = PLUGIN / "train"
        spec = importlib.util.spec_from_file_location(
            "llm_train", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["llm_train"] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"llm_train.{module}")


def test_a_conversation_depends_on_the_seed_and_its_number_alone() -> None:
    world = train("world")
    whole = world.conversations(1, 0, 30)
    assert world.conversations(1, 20, 10) == whole[20:]
    assert world.conversations(2, 0, 30) != whole


def test_the_judges_questions_are_never_trained_on() -> None:
    world = train("world")
    trained = {each.messages[-1]["content"] for each in world.conversations(1, 0, 400) if each.kind != "talk"}
    asked = {each.messages[-1]["content"] for each in world.conversations(2, 0, 60, held_out=True)}
    assert asked and not asked & trained


def test_the_judge_takes_the_right_answer_and_no_other() -> None:
    world, judge = train("world"), train("judge")
    asked = world.conversations(2, 0, 60, held_out=True)
    assert {each.kind for each in asked} == {"fact", "call", "told", "json"}
    assert judge.figures(asked, lambda each: each.answer)["right"] == 1.0
    assert judge.figures(asked, lambda each: each.answer.replace("e", "x"))["right"] < 0.2
    assert judge.figures(asked, lambda each: "")["right"] == 0.0


def test_calls_are_written_in_the_form_that_the_template_shows(tiny_folder: Path) -> None:
    world = train("world")
    called = next(each for each in world.conversations(1, 0, 60) if each.call is not None)
    form = bind(llm(read_config(tiny_folder)), tiny_folder, {}).chat
    parser = AnswerParser(form, tools=[tool["function"]["name"] for tool in called.tools])
    parts = [*parser.push(called.answer), *parser.flush()]
    assert called.call is not None
    assert [part.name for part in parts if isinstance(part, CallBegin)] == [called.call[0]]
    written = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.loads(written) == called.call[1]


def test_a_short_training_lowers_the_loss_and_its_checkpoint_is_read(tmp_path: Path) -> None:
    mini = train("mini")
    tokenizer = mini.make_tokenizer(1, 200)
    mini.write_texts(tmp_path, tokenizer, ties=True, dtype="bfloat16", **mini.SIZES)
    rows = mini.encoded(1, (0, 24), tokenizer.to_str())
    assert tokenizer.decode(rows[1][0][rows[1][1] :], skip_special_tokens=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    options = argparse.Namespace(steps=1, seconds=0.0, rate=3e-3)
    first = mini.train(model, mini.batches(rows[:2], 1024, 1), options)["loss"]
    options.steps = 8
    assert mini.train(model, mini.batches(rows[:2], 1024, 1), options)["loss"] < first
    mini.export(model, tmp_path, tokenizer)
    assert checked(tmp_path) == tmp_path
    processor = Processor(tmp_path, {})
    assert processor.tokenizer.size == read_config(tmp_path).vocab
