"""Log-probabilities belong to the text that they are sent with: characters of several tokens, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mstar_core.api.api_metrics import Metrics
from mstar_core.api.output.encode import EncodedChunk, OutputEncoder, StopStrings
from mstar_core.api.output.token_scores import TokenScore, TokenScores
from mstar_core.api.output.units import OutputItem
from mstar_core.api.text.logprobs import chat_logprobs_of
from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.plugin.surface import LOGPROBS
from tests.fakes.omni_model import TEXT_ONLY

END = 256
TABLE = TokenTable([*(bytes([byte]) for byte in range(256)), b"<end>"], special=[END], ends=[END])


class Bytes:
    """Detokenizer of one id per byte. The end writes nothing."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(each for each in ids if each != END))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


async def encoded(text: bytes, *stops: str, together: int = 1, ends: bool = True) -> list[EncodedChunk]:
    """Return the chunks of a text, `together` ids per output. The id at place i has the log-probability -i."""

    async def no_files(array: Any, modality: str) -> tuple[bytes, dict[str, Any]]:
        raise AssertionError(modality)

    filtered = StopStrings(stops) if stops else None
    encoder = OutputEncoder(TEXT_ONLY, no_files, Bytes(), Metrics(), stops=filtered, scores=TokenScores(TABLE))
    ids = [*text, END] if ends else [*text]
    chunks: list[EncodedChunk] = []
    for start in range(0, len(ids), together):
        part = ids[start : start + together]
        numbers = np.array([[-(start + at), each, -0.5, 65, -1.5, -1, -1] for at, each in enumerate(part)])
        for modality, array in ((LOGPROBS, numbers), ("text", np.array(part))):
            chunks += await encoder.chunks([OutputItem(modality=modality, port=modality, array=array)])
    return chunks + encoder.flush()


def tokens(chunks: Sequence[EncodedChunk]) -> list[TokenScore]:
    return [score for chunk in chunks for score in chunk.scores]


def written(chunks: Sequence[EncodedChunk]) -> bytes:
    return b"".join(chunk.data for chunk in chunks)


@pytest.mark.parametrize("together", [1, 2, 5, 100])
@pytest.mark.parametrize("text", ["plain", "aé😀b", "😀"])
async def test_tokens_write_the_text_that_they_are_sent_with(text: str, together: int) -> None:
    chunks = await encoded(text.encode(), together=together)
    for chunk in chunks:
        assert b"".join(score.token.data for score in chunk.scores) == chunk.data
    assert [score.token.logprob for score in tokens(chunks)] == [-float(at) for at in range(len(text.encode()))]
    assert all(0 <= score.start <= len(text) for score in tokens(chunks))


async def test_bytes_of_half_a_character_stay_with_its_replacement() -> None:
    chunks = await encoded("a😀".encode()[:-2], ends=False)
    assert written(chunks).decode() == "a\ufffd"
    assert [score.token.data for score in tokens(chunks)] == [b"a", b"\xf0", b"\x9f"]


@pytest.mark.parametrize("together", [1, 3, 100])
async def test_a_stop_string_takes_its_tokens_with_it(together: int) -> None:
    chunks = await encoded(b"one two three", "two", together=together)
    assert written(chunks) == b"one "
    assert b"".join(score.token.data for score in tokens(chunks)) == b"one "


async def test_text_that_was_held_back_for_a_stop_string_keeps_its_tokens() -> None:
    chunks = await encoded(b"one tw", "two")
    assert written(chunks) == b"one tw"
    assert b"".join(score.token.data for score in tokens(chunks)) == b"one tw"


async def test_openais_form_has_bytes_alternatives_and_no_infinity() -> None:
    scores = tokens(await encoded("é".encode()))
    first, second = chat_logprobs_of(scores).content
    assert (first.token, first.bytes, first.logprob) == ("\ufffd", [0xC3], 0.0)
    assert [(other.token, other.logprob) for other in second.top_logprobs] == [("\ufffd", -0.5), ("A", -1.5)]
    table = TokenScores(TABLE)
    table.add(np.array([[-np.inf]]))
    table.wrote(65, "A")
    assert chat_logprobs_of(table.sent("A")).content[0].logprob == -9999.0
