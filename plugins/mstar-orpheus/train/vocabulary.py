"""Byte vocabulary of the miniature, in the ids and files that the plugin reads."""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mstar_orpheus.checkpoint.config import IDS_PER_FRAME

from .codec_parts import MINI_SNAC

BYTES: Final = 256
SPECIALS: Final = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|reserved|>",
    *(f"<custom_token_{number}>" for number in range(10)),
)
BEGIN, EOT, CUSTOM = BYTES, BYTES + 4, BYTES + 6
SPEECH, STOP, HUMAN, HUMAN_END, AI = (CUSTOM + number for number in range(1, 6))
AUDIO: Final = BYTES + len(SPECIALS)
"""Id of code 0 in slot 0, `<custom_token_10>` as in the official vocabulary."""
SIZE: Final = AUDIO + IDS_PER_FRAME * MINI_SNAC.codebook_size
END: Final = (EOT, HUMAN_END, AI, SPEECH)
"""Ids after the text."""


def tokenizer() -> Tokenizer:
    """Return the tokenizer: one id per byte, and `<|begin_of_text|>` before a text.

    Audio ids have no tokens in it, because no text contains them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    made.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], BEGIN)]
    )
    return made


def prompt(text: str, voice: str, made: Tokenizer) -> list[int]:
    """Return the official prompt of a text, as the processor writes it."""
    return [HUMAN, *made.encode(f"{voice}: {text}").ids, *END]
