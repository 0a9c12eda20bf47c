"""Makes small tokenizer files in the forms of other libraries: SentencePiece, Tekken and tiktoken."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

CORPUS = [
    *["hello world, the stop is near. END of the story.", "héllo wörld 日本語 naïve café    four spaces"] * 8,
    *["1 + 2 = 3; a, b, c\treturn (x[0])", "the quick brown fox jumps over the lazy dog 2024 times", "I'm sure you're"]
    * 8,
]
# Ordinary tokens beside the 256 bytes, by rank.
WORDS = [
    "  ",
    "    ",
    "he",
    "ll",
    "hell",
    "hello",
    " w",
    "or",
    " wor",
    " world",
    "\n\n",
    "é",
    "日",
    "00",
    "0000",
    "aa",
    "aaa",
]
TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_sentencepiece(**options: Any) -> bytes:
    """Returns the content of a tokenizer.model. `options` are those of SentencePiece's trainer."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 420, "character_coverage": 0.99} | options,
    )
    return out.getvalue()


def ranked_tokens() -> list[bytes]:
    return [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]


def write_tekken(folder: Path, version: str = "v7", special: Sequence[str] | None = None, **config: object) -> Path:
    """Writes a tekken.json with 40 special tokens. Without `special`, it lists none, as the oldest files."""
    tokens = ranked_tokens()
    numbers = {
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + 40,
        "default_num_special_tokens": 40,
    }
    content: dict[str, object] = {
        "config": {"pattern": TEKKEN_PATTERN, "version": version, **numbers, **config},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }
    if special is not None:
        content["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(special)
        ]
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def write_tiktoken(folder: Path, class_name: str) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranked_tokens())]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    first = len(lines)
    named = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|im_end|>", "special": True},
    }
    config = {
        "auto_map": {"AutoTokenizer": [class_name, None]},
        "added_tokens_decoder": named,
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
