from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece

from lorafleet.api.text.detokenizer import make_detokenizer
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.errors import ConfigError, InvalidRequest, UnsupportedModel
from token_files import TEKKEN_PATTERN, ranked_tokens, train_sentencepiece, write_tekken, write_tiktoken

_WORDS = (
    "the The hello world  a  I'm naïve café 日本語 中文 🎉 👩‍👩‍👧 \t \n \n\n 3.14 == <0x41> ▁ e\u0301 \u00a0 Ω ß x[0]"
)
V13 = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
V13 += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"é": 1}}}
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "R", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "b "},
    {"role": "user", "content": "c"},
]
TOOLS = '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": '
TOOLS += '"object"}}}][/AVAILABLE_TOOLS]'


def texts() -> list[str]:
    """Texts with spaces at their ends and in runs, with characters outside the vocabulary, and with names of tokens."""
    draw = random.Random(0)
    found = ["", " ", "  ", "\n", "a", " a", "a ", "  a  b  ", "▁", "▁▁a", "\r\n", "<0x41>", " " * 31 + "x"]
    found += [char * k for char in " \na=" for k in range(1, 40)]
    for _ in range(150):
        found.append(draw.choice([" ", "", "  "]).join(draw.choices(_WORDS.split(" "), k=draw.randint(1, 12))))
        found.append("".join(chr(draw.choice([32, 97, 98, draw.randint(33, 0x24F)])) for _ in range(20)))
    return found


def saved(folder: Path, model: bytes, config: dict[str, Any] | None = None) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(model)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = make_detokenizer(tokenizer, [], skip_special_tokens=True)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "add_dummy_prefix": False},
        {"model_type": "bpe", "byte_fallback": False, "remove_extra_whitespaces": True},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False, "remove_extra_whitespaces": True},
    ],
)
def test_sentencepiece_models_give_the_tokens_of_the_sentencepiece_library(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    keeps = {"remove_extra_whitespaces": False} if options.get("normalization_rule_name") == "identity" else {}
    model = train_sentencepiece(**keeps | options)
    tokenizer, original = saved(tmp_path, model), sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in texts():
        expected = original.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.encode(text) == [1, *expected]
        if original.unk_id() not in expected:
            assert tokenizer.decode(expected) == streamed(tokenizer, expected) == original.decode(expected)


def test_runs_of_equal_scores_grow_from_the_left_as_in_sentencepiece(tmp_path: Path) -> None:
    """Mistral's models give all runs of spaces one score."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    trained = train_sentencepiece(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)
    proto.ParseFromString(trained)
    known = {piece.piece for piece in proto.pieces}
    for count in (2, 3, 4, 5, 6, 8, 10, 16):
        if "▁" * count not in known:
            proto.pieces.add(piece="▁" * count)
    for piece in proto.pieces:
        if set(piece.piece) == {"▁"}:
            piece.score = -1e9
    model = proto.SerializeToString()
    tokenizer, original = saved(tmp_path, model), sentencepiece.SentencePieceProcessor(model_proto=model)
    for count in range(1, 60):
        assert tokenizer.encode(" " * count, add_special_tokens=False) == original.encode(" " * count)


def test_special_and_added_tokens_of_a_sentencepiece_folder_keep_their_ids(tmp_path: Path) -> None:
    model = train_sentencepiece(model_type="bpe", byte_fallback=True, user_defined_symbols=["<|user|>", "<unused>"])
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size, "<|tool|>": size + 1}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = saved(tmp_path, model, {"add_bos_token": False, "tokenizer_class": "LlamaTokenizer", "legacy": False})
    assert tokenizer.eos_token_id == size
    assert tokenizer.encode("<|im_end|><|tool|><|user|></s>") == [size, size + 1, 3, 2]
    assert tokenizer.special_tokens["bos_token"] == "<s>"
    assert size in tokenizer.special_ids
    assert size + 1 not in tokenizer.special_ids
    renamed = {"added_tokens_decoder": {"4": {"content": "[INST]", "special": True}}}
    assert saved(tmp_path, model, renamed).encode("[INST]") == [1, 4]
    gap = {"added_tokens_decoder": {str(size + 5): {"content": "<far>", "special": True}}}
    with pytest.raises(ConfigError, match="gives '<far>' the id"):
        saved(tmp_path, model, gap)


def test_text_after_a_special_token_begins_with_a_space_only_in_legacy_folders(tmp_path: Path) -> None:
    model = train_sentencepiece(model_type="bpe", byte_fallback=True)
    new, old = (saved(tmp_path, model, {"legacy": legacy}) for legacy in (False, True))
    assert new.token_name(new.encode("</s>hello")[2])[0] != "▁"
    assert old.token_name(old.encode("</s>hello")[2])[0] == "▁"


def test_damaged_and_unknown_models_are_refused_by_name(tmp_path: Path) -> None:
    model = train_sentencepiece(model_type="bpe")
    for damaged in (b"", b"no model", model[:-7], b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"):
        with pytest.raises(ConfigError, match="no SentencePiece model"):
            saved(tmp_path, damaged)
    with pytest.raises(UnsupportedModel, match="model_type=4"):
        saved(tmp_path, train_sentencepiece(model_type="char"))


def tiktoken_ids(text: str, pattern: str) -> list[int]:
    """The definition of tiktoken's encoding: in each match, the leftmost pair with the lowest rank is joined."""
    ranks, ids = {token: rank for rank, token in enumerate(ranked_tokens())}, []
    for match in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in match.encode()]
        if match.encode() in ranks:
            parts = [match.encode()]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def test_tekken_gives_the_tokens_of_its_definition_behind_the_special_ones(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tekken(tmp_path))
    assert tokenizer.vocab_size == 40 + len(ranked_tokens())
    assert (tokenizer.eos_token_id, tokenizer.token_name(19), tokenizer.token_name(39)) == (
        2,
        "[TOOL_CONTENT]",
        "<SPECIAL_39>",
    )
    assert tokenizer.encode("[INST]a[/INST]</s>") == [1, 3, 40 + ord("a"), 4, 2]
    for text in texts():
        expected = [40 + rank for rank in tiktoken_ids(text, TEKKEN_PATTERN)]
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == streamed(tokenizer, expected) == text


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "v3",
            '<s>[INST]a[/INST][TOOL_CALLS][{"name": "f", "arguments": {"é": 1}, "id": "abcdefghi"}]</s>'
            f'[TOOL_RESULTS]{{"content": "R", "call_id": "abcdefghi"}}[/TOOL_RESULTS]b</s>{TOOLS}[INST]S\n\nc[/INST]',
        ),
        (
            "v7",
            '<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]a[/INST][TOOL_CALLS][{"name": "f", "arguments": {"é": 1}, "id": '
            f'"abcdefghi"}}]</s>[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]R[/TOOL_RESULTS]b</s>{TOOLS}[INST]c[/INST]',
        ),
        (
            "v11",
            '<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]a[/INST][TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"é": 1}</s>'
            f"[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]R[/TOOL_RESULTS]b</s>{TOOLS}[INST]c[/INST]",
        ),
        (
            "v13",
            f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{TOOLS}[INST]a[/INST][TOOL_CALLS]f[ARGS]"
            '{"é": 1}</s>[TOOL_RESULTS]R[/TOOL_RESULTS]b</s>[INST]c[/INST]',
        ),
    ],
)
def test_a_tekken_folder_without_a_template_gets_that_of_its_version(
    tmp_path: Path, version: str, expected: str
) -> None:
    """The texts are those of mistral-common 1.9.1."""
    tokenizer = Tokenizer.from_folder(write_tekken(tmp_path, version, V13))
    assert tokenizer.render_chat(TALK, tools=[TOOL]) == expected


def test_a_tekken_folders_own_template_comes_first(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert Tokenizer.from_folder(folder).chat_template == "processor"
    (folder / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.from_folder(folder).chat_template == "jinja"


def test_damaged_tekken_files_are_refused(tmp_path: Path) -> None:
    for special, config, why in (
        (V13[:1], {}, "with <s> and </s>"),
        (V13 * 3, {}, "at most 40"),
        (None, {"version": "v13"}, "lists no special_tokens"),
        (None, {"default_vocab_size": 9999}, "demands 9959"),
        (None, {"pattern": 7}, "no tekken.json"),
    ):
        with pytest.raises(ConfigError, match=why):
            Tokenizer.from_folder(write_tekken(tmp_path, special=special, **config))
    unknown = Tokenizer.from_folder(write_tekken(tmp_path, "v99", V13))
    with pytest.raises(InvalidRequest, match="--chat-template"):
        unknown.render_chat(TALK)


def test_tiktoken_files_are_read_for_known_classes_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tiktoken(tmp_path, "tokenization_kimi.TikTokenTokenizer"))
    first = len(ranked_tokens())
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.token_name(first + 1) == f"<|reserved_token_{first + 1}|>"
    assert tokenizer.eos_token_id == first + 2
    text = "hello world日本語hello\n\n 0000 It'S  x"
    pieces = ["hello", " world", "日本語", "hello", "\n\n", " ", "000", "0", " It'S", " ", " x"]
    expected = [token for piece in pieces for token in tiktoken_ids(piece, "(?s).+")]
    assert tokenizer.encode(text + "<|im_end|>") == [*expected, first + 2]
    with pytest.raises(UnsupportedModel, match=r"'other\.Class'"):
        Tokenizer.from_folder(write_tiktoken(tmp_path, "other.Class"))
