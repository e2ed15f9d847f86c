"""Generated ids in rendered templates: exact where the mark stands, and text where a template does otherwise."""

from __future__ import annotations

import pytest

from mstar_core.plugin.chat.marks import MARK, encoded_with, with_marks
from mstar_core.plugin.chat.template import ChatTemplate

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second"},
    {"role": "user", "content": "three"},
]


def encode(text: str) -> list[int]:
    return list(text.encode())


def encoded(
    template: str, answers: dict[int, list[int]], messages: list[dict[str, str]] = MESSAGES
) -> list[int] | None:
    prompt = ChatTemplate(template, {}).render(with_marks(messages, answers), [], {})
    return encoded_with(prompt, answers, encode)


def test_answers_stand_where_their_text_would() -> None:
    plain = encode(ChatTemplate(CHATML, {}).render(MESSAGES, [], {}))
    assert encoded(CHATML, {1: encode("first"), 3: encode("second")}) == plain
    assert encoded(CHATML, {3: encode("second")}) == plain
    ids = encoded(CHATML, {1: [900, 901]})
    assert ids is not None and ids[: len(b"<|user|>\none<|end|>\n<|assistant|>\n") + 2][-2:] == [900, 901]


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{{ m.content }}", "{{ m.content[:2] }}"),
        CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
        CHATML.replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}"),
        CHATML.replace("{{ m.content }}", " {{ m.content }} "),
    ],
    ids=["cut", "doubled", "left out", "behind a space"],
)
def test_a_template_that_does_not_write_an_answer_as_it_is_gets_its_text(template: str) -> None:
    assert encoded(template, {1: [900]}) is None


@pytest.mark.parametrize("place", [0, 2])
def test_text_of_a_client_that_looks_like_a_mark_is_text(place: int) -> None:
    messages = [dict(message) for message in MESSAGES]
    messages[place]["content"] = f"{MARK}1{MARK}"
    assert encoded(CHATML, {1: [900]}, messages) is None
