from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_conversion import has_general_class
from lorafleet.protocol.errors import ConfigError, InvalidRequest
from tiny_models import make_model


def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    text = "hello wörld 日本語 🎉\x00 END"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_of_tokens_join_to_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "日本語 🎉 naïve a tool é\n"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_any_token_sequence_has_the_bytes_that_the_library_decodes(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 9))]
        for skip in (True, False):
            table = tokenizer.byte_table(skip_special_tokens=skip)
            joined = b"".join(table[i] for i in ids).decode(errors="replace")
            assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


def test_half_a_character_is_spelt_in_bytes(tokenizer: Tokenizer) -> None:
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    assert tokenizer.token_text(half) == "bytes:\\xf0"


def test_byte_fallback_tokens_are_their_byte(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = sentencepiece_tokenizer.encode("日")
    assert b"".join(map(sentencepiece_tokenizer.token_bytes, ids)) == "日".encode()


def test_an_id_beyond_the_vocabulary_is_no_text(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocab_size + 7
    assert (tokenizer.token_bytes(beyond), tokenizer.token_name(beyond), tokenizer.decode([beyond])) == (b"", "", "")


def test_chat_template_sees_messages_and_arguments(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}], template_kwargs={"thinking": True})
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>"


def test_continue_final_message_leaves_the_last_message_open(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure,"}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nSure,")


def test_what_a_template_raises_is_the_callers_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no villains here"):
        tokenizer.render_chat([{"role": "villain", "content": "hi"}])


def test_template_arguments_cannot_replace_the_servers(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="tokenize"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}], template_kwargs={"tokenize": True})


def test_a_model_without_template_says_so(byte_tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_tokenizer_folder)
    tokenizer._hf.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        Tokenizer.from_folder(tmp_path / "absent")


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="cannot be tokenized"):
        tokenizer.encode("\ud800")


def test_fewest_tokens_is_a_lower_bound_that_costs_nothing(tokenizer: Tokenizer) -> None:
    for text in ("", "x", "hello world " * 50, "日本語🎉" * 40, "the stop is near " * 30):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.fewest_tokens("x" * 10_000_000) > 100_000


@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_a_tokenizer_of_transformers_general_class_is_read_without_torch(
    byte_tokenizer_folder: Path, tmp_path: Path, name: str
) -> None:
    shutil.copy(byte_tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = json.loads((byte_tokenizer_folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
    program = (
        "import sys; from lorafleet.api.text.tokenizer import Tokenizer; Tokenizer.from_folder(sys.argv[1]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    assert type(AutoTokenizer.from_pretrained(tmp_path)).__name__ == "TokenizersBackend"


def test_a_model_type_for_which_transformers_has_its_own_class_is_read_by_that(
    byte_tokenizer_folder: Path, tmp_path: Path
) -> None:
    own = {
        name: named
        for name in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if (named := tokenization_auto.TOKENIZER_MAPPING_NAMES[name]) != "TokenizersBackend"
    }
    assert {"qwen2", "qwen3_5"} <= own.keys()
    for name in own:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(byte_tokenizer_folder / file, tmp_path / name / file)
        assert not has_general_class(tmp_path / name), name
    expected = AutoTokenizer.from_pretrained(tmp_path / "qwen2")
    text = "x12 e\u0301"  # Qwen2Tokenizer composes the last two characters.
    assert Tokenizer.from_folder(tmp_path / "qwen2").encode(text) == expected.encode(text)
    assert Tokenizer.from_folder(tmp_path / "qwen2").encode(text) != Tokenizer.from_folder(
        byte_tokenizer_folder
    ).encode(text)


def test_what_a_library_raises_names_the_folder_and_the_field(tmp_path: Path) -> None:
    """AutoTokenizer reads the model's config.json as well, whose class checks types."""
    folder = make_model(tmp_path / "model", "qwen2", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}))
    with pytest.raises(ConfigError, match=r"(?s)the tokenizer in .*model cannot be read: .*hidden_size.*config\.json"):
        Tokenizer.from_folder(folder)
