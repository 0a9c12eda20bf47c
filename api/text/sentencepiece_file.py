"""Reads a SentencePiece model (tokenizer.model) into a tokenizer of the `tokenizers` library.

The file is a protobuf message of few fields, which are read here, because the generated reader in the sentencepiece
package demands one exact version of protobuf. Source: sentencepiece_model.proto of google/sentencepiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lorafleet.protocol.errors import ConfigError, UnsupportedModel

SPACE = "▁"


class PieceKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: PieceKind


@dataclass(slots=True)
class SentencePieceModel:
    """The content of the file. The defaults are those of the format."""

    pieces: list[Piece] = field(default_factory=list)  # By token id.
    is_bpe: bool = False  # Otherwise it is a unigram model.
    byte_fallback: bool = False
    bos_id: int = 1  # Negative: there is none; the same for eos_id.
    eos_id: int = 2
    suffix_spaces: bool = False  # A space belongs to the word before it.
    charsmap: bytes = b""  # Compiled rules of normalization; empty: texts are not normalized.
    adds_space: bool = True  # A text begins with a space that is not in it.
    merges_spaces: bool = True  # Runs of spaces become one, and none is left at the ends.
    escapes_spaces: bool = True  # A space is written as SPACE.

    @property
    def unk_id(self) -> int:
        """The id of the token for unknown text; the format demands exactly one."""
        found = [i for i, piece in enumerate(self.pieces) if piece.kind is PieceKind.UNKNOWN]
        if len(found) != 1:
            raise ConfigError(f"the SentencePiece model has {len(found)} unknown tokens; it must have one.")
        return found[0]


def read_sentencepiece(raw: bytes) -> SentencePieceModel:
    """Raises ConfigError if the bytes are no SentencePiece model, and UnsupportedModel for options that are not
    supported."""
    model = SentencePieceModel()
    kind_of_model = 1
    try:
        for number, value in _fields(raw):
            if number == 1:
                model.pieces.append(_piece(dict(_fields(_bytes(value)))))
            elif number == 2:
                trainer = dict(_fields(_bytes(value)))
                kind_of_model = _int(trainer.get(3, 1))
                model.is_bpe = kind_of_model == 2
                model.suffix_spaces = bool(_int(trainer.get(24, 0)))
                model.byte_fallback = bool(_int(trainer.get(35, 0)))
                model.bos_id, model.eos_id = _signed(trainer.get(41, 1)), _signed(trainer.get(42, 2))
            elif number == 3:
                rules = dict(_fields(_bytes(value)))
                model.charsmap = _bytes(rules.get(2, b""))
                model.adds_space = bool(_int(rules.get(3, 1)))
                model.merges_spaces = bool(_int(rules.get(4, 1)))
                model.escapes_spaces = bool(_int(rules.get(5, 1)))
    except (ValueError, IndexError, struct.error) as error:
        raise ConfigError(f"the file is no SentencePiece model: {error}.") from None
    if not model.pieces:
        raise ConfigError("the file is no SentencePiece model: it has no pieces.")
    unsupported = {
        f"model_type={kind_of_model}": kind_of_model not in (1, 2),
        "treat_whitespace_as_suffix": model.suffix_spaces,
        "escape_whitespaces=false": not model.escapes_spaces,
        "unused pieces": any(piece.kind is PieceKind.UNUSED for piece in model.pieces),
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise UnsupportedModel(
                f"the SentencePiece model has {name}, which is not supported; convert the tokenizer to tokenizer.json."
            )
    return model


def build_tokenizer(
    model: SentencePieceModel, *, names: Mapping[int, str], legacy: bool, add_bos: bool, add_eos: bool
) -> Tokenizer:
    """Converts a SentencePiece model. Texts get the same tokens as from the sentencepiece library.

    Args:
        names: Other names for some pieces by id, from tokenizer_config.json.
        legacy: The text after each special token begins with a space too, as in old versions of transformers.
    """
    pieces = [
        Piece(names[i], piece.score, PieceKind.CONTROL) if names.get(i, piece.text) != piece.text else piece
        for i, piece in enumerate(model.pieces)
    ]
    unk_id = model.unk_id
    tokenizer = Tokenizer(_bpe(pieces, unk_id, model) if model.is_bpe else _unigram(pieces, unk_id, model))
    tokenizer.normalizer = normalizers.Sequence(_normalizers(model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(model, legacy=legacy))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            *([decoders.ByteFallback()] if model.byte_fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if model.adds_space else []),
        ]
    )
    special = (PieceKind.CONTROL, PieceKind.UNKNOWN)
    tokenizer.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=piece.kind in special)
            for piece in pieces
            if piece.kind in (*special, PieceKind.USER_DEFINED)
        ]
    )
    ends = [(i, has) for i, has in ((model.bos_id, add_bos), (model.eos_id, add_eos)) if 0 <= i < len(pieces)]
    tokenizer.post_processor = bracketing(
        [pieces[i].text for i, has in ends[:1] if has and i == model.bos_id],
        [pieces[i].text for i, has in ends if has and i == model.eos_id],
        tokenizer,
    )
    return tokenizer


def bracketing(first: Sequence[str], last: Sequence[str], tokenizer: Tokenizer) -> processors.TemplateProcessing:
    """Returns the step that puts special tokens before and after a text."""
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B", *last],
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in dict.fromkeys([*first, *last])],
    )


def _normalizers(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.merges_spaces:
        # If a space is added, one that is there takes its place.
        ends = "^ +$|(?<=[^ ]) +$" if model.adds_space else "^ +| +$"
        steps += [
            normalizers.Replace(SPACE, " "),
            normalizers.Replace(Regex(ends), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    return [*steps, normalizers.Replace(" ", SPACE)]


def _pre_tokenizers(model: SentencePieceModel, *, legacy: bool) -> list[pre_tokenizers.PreTokenizer]:
    steps: list[pre_tokenizers.PreTokenizer] = []
    scheme = "always" if legacy else "first"
    if model.adds_space and model.merges_spaces:
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False))
    elif model.adds_space:
        # The first step adds one space, even if the text begins with SPACE already; the second one escapes it.
        steps.append(pre_tokenizers.Metaspace(" ", prepend_scheme=scheme, split=False))
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False))
    if model.byte_fallback and not model.is_bpe:
        # The unigram model would take the letters <0x41> in a text for the token of that byte.
        steps.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous"))
    return steps


def _bpe(pieces: Sequence[Piece], unk_id: int, model: SentencePieceModel) -> models.BPE:
    """Makes a merge of each way to divide a piece into two. The piece with the highest score is merged first.

    Some models give all runs of spaces one score. SentencePiece merges the leftmost of equal pairs, so a run grows at
    its beginning: pairs with a long left part go first.
    """
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    _check_names(ids, pieces)
    joined = {piece.text: piece.score for piece in pieces if piece.kind is PieceKind.NORMAL}
    merges: list[tuple[float, int, str, str]] = []
    for text, score in joined.items():
        merges += [
            (-score, -cut, text[:cut], text[cut:])
            for cut in range(1, len(text))
            if text[:cut] in joined and text[cut:] in joined
        ]
    merges.sort()
    return models.BPE(
        ids,
        [(left, right) for _, _, left, right in merges],
        unk_token=pieces[unk_id].text,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigram(pieces: Sequence[Piece], unk_id: int, model: SentencePieceModel) -> models.Unigram:
    _check_names({piece.text: i for i, piece in enumerate(pieces)}, pieces)
    return models.Unigram([(piece.text, piece.score) for piece in pieces], unk_id, model.byte_fallback)


def _check_names(ids: Mapping[str, int], pieces: Sequence[Piece]) -> None:
    if len(ids) != len(pieces):
        twice = next(piece.text for i, piece in enumerate(pieces) if ids[piece.text] != i)
        raise ConfigError(f"the SentencePiece model has two pieces named {twice!r}; each must have its own name.")


def _piece(fields: Mapping[int, int | bytes]) -> Piece:
    [score] = struct.unpack("<f", _bytes(fields.get(2, bytes(4))))
    return Piece(_bytes(fields.get(1, b"")).decode(), score, PieceKind(_int(fields.get(3, 1))))


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a protobuf message: numbers as integers, everything else as bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        if tag & 7 == 0:
            number, at = _varint(raw, at)
            yield tag >> 3, number
            continue
        size = {1: 8, 5: 4}.get(tag & 7)
        if size is None:
            if tag & 7 != 2:
                raise ValueError(f"byte {at} begins no protobuf field")
            size, at = _varint(raw, at)
        if at + size > len(raw):
            raise ValueError(f"a field of {size} bytes at byte {at} goes past the end")
        yield tag >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        number |= (raw[at] & 127) << shift
        at += 1
        if raw[at - 1] < 128:
            return number, at
    raise ValueError(f"byte {at} ends no number")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has the wrong type")
    return value


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value


def _signed(value: int | bytes) -> int:
    number = _int(value) & 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
