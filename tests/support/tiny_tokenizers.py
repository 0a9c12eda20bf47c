"""Makes tiny tokenizers for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lorafleet.api.text.tokenizer import Tokenizer

CORPUS = ["hello world, the stop is near. END of the story.", "héllo wörld 日本語 🎉 naïve café", "1 + 2 = 3; a, b, c"]
CHAT_TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'villain' -%}{{ raise_exception('no villains here') }}{%- endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if thinking %}<think>{% endif %}{%- endif -%}"""


def _save(backend: Backend, folder: Path, **special: str) -> Path:
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    hf.chat_template = CHAT_TEMPLATE
    hf.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a byte-level BPE tokenizer; one added token is not special and has characters outside the byte alphabet."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|eos|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("a tool é", special=False)])
    return _save(backend, tmp_path_factory.mktemp("byte_tokenizer"), eos_token="<|eos|>")


@pytest.fixture(scope="session")
def sentencepiece_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a tokenizer like Llama 2's: `▁` for spaces, byte fallback, one leading space stripped."""
    words = ["▁hello", "▁world", "▁", "h", "e", "l", "o", "w", "r", "d", ",", "▁END", "é"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return _save(backend, tmp_path_factory.mktemp("sp_tokenizer"), bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_tokenizer_folder)


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(sentencepiece_tokenizer_folder)
