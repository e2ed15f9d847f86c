"""Reader of SentencePiece BPE models as `tokenizers` tokenizers, for checkpoints without tokenizer.json.

Source of the field numbers: the published sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from mstar_core.errors import WeightsError

SPACE: Final = "▁"
BPE_KIND: Final = 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_TRAINER_KIND, _TRAINER_BYTES = 3, 35
_CHARS_MAP, _DUMMY_PREFIX, _SQUEEZES, _ESCAPES = 2, 3, 4, 5


@dataclass(slots=True)
class Piece:
    """Vocabulary entry. Its index is its id."""

    text: str = ""
    score: float = 0.0
    kind: int = NORMAL


@dataclass(slots=True)
class Model:
    """Contents of a model file, with the format's defaults."""

    pieces: list[Piece] = field(default_factory=list)
    kind: int = 1
    has_bytes: bool = False
    chars_map: bytes = b""
    has_prefix: bool = True
    squeezes: bool = True
    escapes: bool = True


def read_sentencepiece(path: Path) -> Tokenizer:
    """Read the tokenizer of a `.model` file, without automatic special tokens. Raises WeightsError naming the file."""
    try:
        model = _parsed(path.read_bytes())
    except (OSError, IndexError, ValueError, struct.error) as error:
        raise WeightsError(
            f"{path} is not a SentencePiece model", str(error), "fetch it again", file=str(path)
        ) from error
    if model.kind != BPE_KIND or model.squeezes or not model.escapes:
        detail = f"kind {model.kind}, remove_extra_whitespaces {model.squeezes}"
        raise WeightsError(f"{path} is not PaliGemma's tokenizer", detail, "use PaliGemma's tokenizer", file=str(path))
    return _built(model, path)


def _built(model: Model, path: Path) -> Tokenizer:
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = next((piece.text for piece in model.pieces if piece.kind == UNKNOWN), None)
    bpe = models.BPE(
        vocab=ids, merges=_merges(model, ids), unk_token=unknown, fuse_unk=True, byte_fallback=model.has_bytes
    )
    tokenizer = Tokenizer(bpe)
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.chars_map)] if model.chars_map else []
    steps += [normalizers.Prepend(SPACE)] if model.has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    control = [piece.text for piece in model.pieces if piece.kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    texts = [piece.text for piece in model.pieces if piece.kind == USER_DEFINED]
    # Normalized, because some are runs of spaces, which are matched after spaces are replaced.
    tokenizer.add_tokens([AddedToken(text, normalized=True, special=False) for text in texts])
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(model.pieces):
        raise WeightsError(f"{path} contains a piece twice", hint="fetch it again", file=str(path))
    return tokenizer


def _merges(model: Model, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merge pairs in priority order: by score of the merged piece."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece in model.pieces:
        if piece.kind != NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in ids and right in ids:
                merges.append((-piece.score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


# -- the file -------------------------------------------------------------------------------------------------------


def _parsed(data: bytes) -> Model:
    model = Model()
    for number, value in _fields(data):
        if number == _PIECES and isinstance(value, bytes):
            model.pieces.append(_piece(value))
        elif number == _TRAINER and isinstance(value, bytes):
            _read_trainer(model, value)
        elif number == _NORMALIZER and isinstance(value, bytes):
            _read_normalizer(model, value)
    if not model.pieces:
        raise ValueError("it contains no pieces")
    return model


def _piece(data: bytes) -> Piece:
    piece = Piece()
    for number, value in _fields(data):
        if number == _PIECE_TEXT and isinstance(value, bytes):
            piece.text = value.decode("utf-8")
        elif number == _PIECE_SCORE and isinstance(value, float):
            piece.score = value
        elif number == _PIECE_KIND and isinstance(value, int):
            piece.kind = value
    return piece


def _read_trainer(model: Model, data: bytes) -> None:
    for number, value in _fields(data):
        if number == _TRAINER_KIND and isinstance(value, int):
            model.kind = value
        elif number == _TRAINER_BYTES and isinstance(value, int):
            model.has_bytes = bool(value)


def _read_normalizer(model: Model, data: bytes) -> None:
    for number, value in _fields(data):
        if number == _CHARS_MAP and isinstance(value, bytes):
            model.chars_map = value
        elif number == _DUMMY_PREFIX:
            model.has_prefix = bool(value)
        elif number == _SQUEEZES:
            model.squeezes = bool(value)
        elif number == _ESCAPES:
            model.escapes = bool(value)


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield field number and value of a protocol-buffer message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
            case 1:
                yield tag >> 3, struct.unpack_from("<d", data, at)[0]
                at += 8
            case 2:
                size, at = _varint(data, at)
                if at + size > len(data):
                    raise ValueError("it is truncated")
                yield tag >> 3, data[at : at + size]
                at += size
            case 5:
                yield tag >> 3, struct.unpack_from("<f", data, at)[0]
                at += 4
            case kind:
                raise ValueError(f"unknown wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
