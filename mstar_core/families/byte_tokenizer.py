"""Byte-level tokenizer of generated checkpoints: every text has ids, without a trained vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def byte_tokenizer(
    control: Sequence[str] = (), *, merges: Sequence[str] = (), markers: Sequence[str] = ()
) -> Tokenizer:
    """Return a tokenizer of 256 bytes, then one id for each merge, control token and marker, in this order.

    merges: pairs of tokens such as "Ġ t", in the order of their rank. markers: tokens of one id that is a usual one.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markers])
    return tokenizer
