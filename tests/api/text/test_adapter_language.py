"""Adapters that bring a tokenizer, a chat template or ends of answers: what their requests are written in."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from lorafleet.api.text.adapter_language import LanguageReader
from lorafleet.api.text.templates import TemplateSandbox
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizers import Encoders
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.messages import Vocabulary

PADDED = 400  # rows of the base's tables, more than its tokenizer has tokens
EOS = 0  # <|eos|>
LORA = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 4)}


@pytest.fixture
def base(byte_tokenizer_folder) -> Tokenizer:
    return Tokenizer.from_folder(byte_tokenizer_folder)


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[tuple[TemplateSandbox, Encoders]]:
    made = TemplateSandbox(num_processes=1), Encoders()
    yield made
    for sandbox in made:
        sandbox.close()


@pytest.fixture
def reader(base, sandboxes) -> LanguageReader:
    return LanguageReader(base, PADDED, [EOS], *sandboxes)


@pytest.fixture
def adapter(tmp_path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file(LORA, tmp_path / "adapter_model.safetensors")
    return tmp_path


def own_tokenizer(base_folder: Path, folder: Path, *added: str, **special: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base_folder)
    tokenizer.add_tokens(list(added))
    for name, token in special.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_an_adapters_context_comes_from_its_scaling(base, sandboxes, adapter):
    reader = LanguageReader(base, PADDED, [EOS], *sandboxes, rope_positions=4096)
    (adapter / "lorafleet.json").write_text('{"rope_scaling": {"type": "linear", "factor": 4.0}}')
    assert reader.read(adapter).context_length == 16384
    (adapter / "adapter_config.json").write_text('{"context_length": 10000}')
    assert reader.read(adapter).context_length == 10000


def test_an_adapter_without_files_of_its_own_has_the_bases_language(reader, adapter):
    assert reader.read(adapter) == reader.base


def test_the_bases_own_tokenizer_beside_an_adapter_is_recognized(reader, adapter, byte_tokenizer_folder, base):
    """Saved anew, by another version, with a padding that a trainer set."""
    own_tokenizer(byte_tokenizer_folder, adapter)
    path = adapter / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 99, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    language = reader.read(adapter)
    assert language.tokenizer is base and language.vocabulary is None and language.template is None


def test_a_tokenizer_with_more_tokens_is_the_adapters_own(reader, adapter, byte_tokenizer_folder, base):
    own_tokenizer(byte_tokenizer_folder, adapter, "<plan>", "<act>")
    size = base.vocab_size + 2
    tables = {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.modules_to_save.weight"}
    save_file(LORA | {name: torch.zeros(size, 4) for name in tables}, adapter / "adapter_model.safetensors")
    language = reader.read(adapter)
    assert language.tokenizer.encode("<plan>a<act>") == [size - 2, *base.encode("a"), size - 1]
    assert language.vocabulary == Vocabulary(size, [EOS])
    assert reader.read(adapter).tokenizer is language.tokenizer, "it is read once"


def test_an_end_of_its_own_stands_beside_the_bases_where_that_means_the_same(
    reader, adapter, byte_tokenizer_folder, base
):
    own_tokenizer(byte_tokenizer_folder, adapter, eos_token="<|im_end|>")
    im_end = base.encode("<|im_end|>")[0]
    assert reader.read(adapter).vocabulary == Vocabulary(PADDED, [EOS, im_end])
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert reader.read(adapter).vocabulary == Vocabulary(PADDED, [7, 9, im_end])
    (adapter / "tokenizer.json").unlink()  # The other files name an end of the base's tokenizer.
    assert reader.read(adapter).vocabulary == Vocabulary(PADDED, [7, 9, im_end])
    (adapter / "generation_config.json").unlink()
    assert reader.read(adapter).vocabulary == Vocabulary(PADDED, [EOS, im_end])
    (adapter / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    ordinary = base.encode("a")[0]
    for decoder, end in (({}, im_end), ({"added_tokens_decoder": {}}, ordinary)):
        (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"} | decoder))
        assert reader.read(adapter).vocabulary == Vocabulary(PADDED, [EOS, end])
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": "7"}))
    with pytest.raises(AdapterMalformed, match="eos_token_id"):
        reader.read(adapter)


@pytest.mark.parametrize("eos", [PADDED, 10**30, [0, PADDED], [EOS] * 65])
def test_ends_of_answers_that_no_answer_can_have_are_refused(reader, adapter, eos):
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(AdapterMalformed, match=r"ids 0 to 399|at most 64"):
        reader.read(adapter)


def test_an_added_end_beside_tables_that_were_not_resized_is_refused(base, adapter, byte_tokenizer_folder, sandboxes):
    own_tokenizer(byte_tokenizer_folder, adapter, "<end>", eos_token="<end>")
    reader = LanguageReader(base, base.vocab_size, [EOS], *sandboxes)
    with pytest.raises(AdapterMalformed, match=f"token {base.vocab_size} .*Save the resized embed_tokens"):
        reader.read(adapter)


def test_a_template_is_the_adapters_own_in_either_file_and_the_bases_where_it_is_the_same(reader, adapter, base):
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    template = reader.read(adapter).template
    assert template is not None and template.source == "{{ messages[0].content }}"
    assert template.special_tokens["eos_token"] == "<|eos|>"
    (adapter / "chat_template.jinja").write_text(base.chat_template)
    assert reader.read(adapter).template is None
    (adapter / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = reader.read(adapter).template
    assert template is not None and template.source == "yes"


def test_programs_and_damage_are_refused(reader, adapter, byte_tokenizer_folder):
    own_tokenizer(byte_tokenizer_folder, adapter, "<plan>")
    path = adapter / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    with pytest.raises(AdapterUnsupported, match="auto_map"):
        reader.read(adapter)
    path.write_text(json.dumps(config))
    (adapter / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(AdapterMalformed, match="tokenizer cannot be read"):
        reader.read(adapter)


def test_a_tokenizer_that_nobody_uses_any_more_is_read_again(reader, adapter, byte_tokenizer_folder):
    own_tokenizer(byte_tokenizer_folder, adapter, "<plan>")
    first = weakref.ref(reader.read(adapter).tokenizer)
    gc.collect()
    assert first() is None and reader.read(adapter).tokenizer.vocab_size > 0


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("special_tokens_map.json", {"tokenizer_file": "/etc/passwd"}, AdapterUnsupported, "'tokenizer_file'"),
        ("special_tokens_map.json", {"tokenizer_file": "/no/such/file"}, AdapterUnsupported, "'tokenizer_file'"),
        ("special_tokens_map.json", {"vocab_file": "x"}, AdapterUnsupported, "'vocab_file'"),
        ("special_tokens_map.json", {"tokenizer_object": {}}, AdapterUnsupported, "'tokenizer_object'"),
        ("special_tokens_map.json", {"chat_template": "x"}, AdapterUnsupported, "'chat_template'"),
        ("special_tokens_map.json", {"eos_token": 7}, AdapterMalformed, "eos_token 7"),
        ("special_tokens_map.json", {"eos_token": {"content": ["x"]}}, AdapterMalformed, "eos_token"),
        ("special_tokens_map.json", {"eos_token": {"content": "x", "lstrip": 1}}, AdapterMalformed, "lstrip"),
        ("special_tokens_map.json", {"eos_token": "x" * 5000}, AdapterMalformed, "at most 4096"),
        ("special_tokens_map.json", {"extra_special_tokens": ["x"] * 20_000}, AdapterMalformed, "20000 special"),
        ("special_tokens_map.json", {"extra_special_tokens": "x"}, AdapterMalformed, "must be a list"),
        ("tokenizer_config.json", {"bos_token": [1]}, AdapterMalformed, "bos_token"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_only_tokens_pass_of_the_files_beside_a_tokenizer(
    reader, adapter, byte_tokenizer_folder, name, content, error, words
):
    own_tokenizer(byte_tokenizer_folder, adapter, "<plan>")
    (adapter / "tokenizer_config.json").write_text("{}")
    (adapter / name).write_text(json.dumps(content))
    with pytest.raises(error, match=words):
        reader.read(adapter)


def test_what_transformers_would_take_for_a_path_has_no_effect(reader, adapter, byte_tokenizer_folder):
    """Not even where it leads to a good tokenizer: no other file than the adapter's is opened."""
    own_tokenizer(byte_tokenizer_folder, adapter, "<plan>")
    plain = reader.read(adapter).tokenizer
    config = json.loads((adapter / "tokenizer_config.json").read_text())
    for key in ("tokenizer_file", "vocab_file", "merges_file", "name_or_path", "gguf_file", "init_inputs"):
        config[key] = str(byte_tokenizer_folder / "tokenizer.json")
    (adapter / "tokenizer_config.json").write_text(json.dumps(config))
    own = reader.read(adapter).tokenizer
    assert own.encode("<plan>a") == plain.encode("<plan>a") and own.vocab_size == plain.vocab_size


def test_special_tokens_have_their_roles_as_in_transformers(reader, adapter, byte_tokenizer_folder):
    own_tokenizer(byte_tokenizer_folder, adapter, "<plan>", eos_token="<|im_end|>", pad_token="<pad>")
    (adapter / "special_tokens_map.json").write_text('{"bos_token": {"content": "<bos>", "lstrip": false}}')
    for described in (False, True):
        config = json.loads((adapter / "tokenizer_config.json").read_text())
        if described:  # transformers passes the other file over
            config["added_tokens_decoder"] = {}
        (adapter / "tokenizer_config.json").write_text(json.dumps(config))
        own, expected = reader.read(adapter).tokenizer, Tokenizer.from_folder(adapter)
        assert own.special_tokens == expected.special_tokens
        assert own.eos_token_id == expected.eos_token_id
        assert own.special_ids == expected.special_ids
        for text in ("a<plan><pad><|im_end|>", "héllo wörld", "<bos>x"):
            assert own.encode(text) == expected.encode(text)
            assert own.decode(own.encode(text)) == expected.decode(expected.encode(text))


def test_another_tokenizer_or_template_makes_another_digest_and_plain_ones_are_unchanged(adapter):
    plain = folder_digest(adapter)
    digests = {plain}
    (adapter / "README.md").write_text("of no meaning")
    assert folder_digest(adapter) == plain
    for name, text in (("chat_template.jinja", "a"), ("chat_template.jinja", "b"), ("tokenizer.json", "b")):
        (adapter / name).write_text(text)
        digests.add(folder_digest(adapter))
    assert len(digests) == 4
