"""Judge of `llm:mini`: unseen questions, whose answers are compared exactly. By a checkpoint, or over HTTP.

python -m train.judge --url http://127.0.0.1:8000
python -m train.judge --weights FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from . import world

Answer = Callable[[world.Conversation], str]
"""Returns the answer to a conversation, with tool calls in the form of the template."""

MOST_TOKENS: Final = 96
CALL: Final = ("<tool_call>", "</tool_call>")
SCHEMA: Final = "schema"
"""Kind of the questions for JSON whose answer is held by a schema."""

TYPES: Final = {str: "string", int: "integer"}


def is_right(asked: world.Conversation, answer: str) -> bool:
    """Return whether an answer is right: the words, the JSON values, or name and arguments of its only call."""
    try:
        if asked.kind == "call":
            inner = answer.strip().removeprefix(CALL[0]).removesuffix(CALL[1])
            called = json.loads(inner)
            return answer.strip().startswith(CALL[0]) and (called["name"], called["arguments"]) == asked.call
        if asked.kind in ("json", SCHEMA):
            return bool(json.loads(answer) == json.loads(asked.answer))
    except (ValueError, KeyError, TypeError):
        return False
    return answer.strip().casefold() == asked.answer.casefold()


def figures(asked: Sequence[world.Conversation], answer: Answer, workers: int = 1) -> dict[str, Any]:
    """Return the share of right answers by kind, and the first wrong ones. workers: questions at a time."""
    right: Counter[str] = Counter()
    total = Counter(each.kind for each in asked)
    wrong: list[dict[str, str]] = []
    with ThreadPoolExecutor(workers) as pool:
        answers = list(pool.map(answer, asked))
    for each, text in zip(asked, answers, strict=True):
        if is_right(each, text):
            right[each.kind] += 1
        elif len(wrong) < 5:
            wrong.append({"question": each.messages[-1]["content"], "answer": text, "right": each.answer})
    shares = {kind: round(right[kind] / count, 3) for kind, count in sorted(total.items())}
    return {"questions": len(asked), "right": round(right.total() / len(asked), 3), **shares, "wrong": wrong}


def with_schemas(asked: Sequence[world.Conversation]) -> list[world.Conversation]:
    """Return the questions, and those for JSON a second time, as questions whose answer a schema holds."""
    return [*asked, *(replace(each, kind=SCHEMA) for each in asked if each.kind == "json")]


def schema_of(asked: world.Conversation) -> dict[str, Any]:
    """Return the schema of an answer in JSON, in the form of `response_format`."""
    types = {key: {"type": TYPES[type(value)]} for key, value in json.loads(asked.answer).items()}
    schema = {"type": "object", "properties": types, "required": list(types), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "facts", "strict": True, "schema": schema}}


def over_http(url: str, model: str = "llm") -> Answer:
    """Return the answers of a running deployment, greedy, by its chat route."""

    def ask(asked: world.Conversation) -> str:
        messages = [
            {**each, "tool_calls": [_as_sent(call) for call in each["tool_calls"]]} if "tool_calls" in each else each
            for each in asked.messages
        ]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": MOST_TOKENS}
        if asked.tools:
            body["tools"] = list(asked.tools)
        if asked.kind == SCHEMA:
            body["response_format"] = schema_of(asked)
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            message = json.load(response)["choices"][0]["message"]
        # Words beside a call, or a second call, are wrong.
        return (message["content"] or "") + "".join(map(_written, message.get("tool_calls") or []))

    return ask


def _written(call: dict[str, Any]) -> str:
    """Return a call of an answer in the form of the template."""
    function = call["function"]
    said = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    return f"{CALL[0]}{json.dumps(said)}{CALL[1]}"


def _as_sent(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text, which OpenAI's form requires."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def local(folder: Path, device: str = "cpu") -> Answer:
    """Return the greedy answers of a checkpoint, computed by transformers."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    from mstar_core.plugin.chat.template import ChatTemplate
    from mstar_core.plugin.chat.template_form import read_template

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    tokenizer, template = Tokenizer.from_file(str(folder / "tokenizer.json")), ChatTemplate(read_template(folder), {})

    def ask(asked: world.Conversation) -> str:
        ids = tokenizer.encode(template.render(asked.messages, asked.tools, {}), add_special_tokens=False).ids
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids], device=device), max_new_tokens=MOST_TOKENS, do_sample=False, pad_token_id=0
            )
        return str(tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True))

    return ask


def main() -> int:
    """Print one JSON line. Exit with 1 below the share that is demanded."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url")
    source.add_argument("--weights", type=Path)
    parser.add_argument("--model", default="llm", help="name of the deployment's model")
    parser.add_argument("--questions", type=int, default=200, help="of unseen ones; over HTTP, those for JSON twice")
    parser.add_argument("--seed", type=int, default=2, help="which questions are drawn")
    parser.add_argument("--workers", type=int, default=1, help="requests at a time")
    parser.add_argument("--least", type=float, default=0.95, help="least share of right answers")
    options = parser.parse_args()
    asked = world.conversations(options.seed, 0, options.questions, held_out=True)
    if options.url:
        result = figures(with_schemas(asked), over_http(options.url, options.model), options.workers)
    else:
        result = figures(asked, local(options.weights))
    print(json.dumps(result))
    return 0 if result["right"] >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
