"""Language check: sentences that it finds, and sentences that it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import prose

FOUND = {
    "headless docstring": '"""What a child writes."""\n',
    "headless attribute docstring": 'LIMIT = 1\n"""Where requests end."""\n',
    "people in a comment": "x = 1  # nobody waits for it\n",
    "people in a message": 'raise ValueError("the caller is told of it")\n',
    "relative clause for a process": '"""Return the process who holds the lock."""\n',
    "exempt formatting": "x = [1,2]  # fmt: skip\n",
    "negated noun": 'raise ValueError("the file is no mapping")\n',
}
ACCEPTED = {
    "noun phrase": '"""Paged KV-cache allocator."""\n',
    "imperative": '"""Return the page table of a request. Raises KeyError if it has none."""\n',
    "which to": '"""Which to choose is up to the caller."""\n',
    "there is no": "raise ValueError(\"there is no group 'x'\")\n",
    "no longer": "x = 1  # the slot is no longer in use\n",
    "short string": 'user = "nobody"\n',
    "name in code": "nobody = 1\n",
}


@pytest.mark.parametrize("source", FOUND.values(), ids=FOUND)
def test_a_sentence_against_the_rules_is_found(source: str, tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(source)
    (finding,) = prose.check(page)
    assert finding.path == page and finding.advice


@pytest.mark.parametrize("source", ACCEPTED.values(), ids=ACCEPTED)
def test_plain_sentences_and_code_are_accepted(source: str, tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(source)
    assert list(prose.check(page)) == []


def test_a_finding_in_a_page_names_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A request starts.\nSomebody cancels it.\n")
    assert [finding.line for finding in prose.check(page)] == [2]
