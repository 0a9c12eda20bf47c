"""Provides a byte-level BPE tokenizer of 128 thousand tokens, trained on text that is found on this machine.

A model's own tokenizer is not available without a network. The trained one is kept in the temporary folder, since
training takes half a minute of CPU.
"""

from __future__ import annotations

import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

NUM_TOKENS = 128_000
NUM_SPECIAL = 256  # The last of the special tokens ends an answer.
# GPT-4's pattern for splitting text before merges.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def realistic_tokenizer() -> Tokenizer:
    kept = Path(tempfile.gettempdir(), "lorafleet-realistic-tokenizer.json")
    if not kept.exists():
        tokenizer = _train()
        tokenizer.save(str(kept))
    return Tokenizer.from_file(str(kept))


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=48
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    assert tokenizer.get_vocab_size() == NUM_TOKENS, "more text is needed"
    tokenizer.add_special_tokens([f"<|special_{i}|>" for i in range(NUM_SPECIAL)])
    return tokenizer


def _texts(most_characters: int = 80_000_000) -> Iterator[str]:
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(errors="ignore")[:60_000]
        total += len(text)
        yield text
        if total > most_characters:
            return
