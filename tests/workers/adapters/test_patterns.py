"""Pattern gives PEFT's own answers, on patterns that people write."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from peft.utils.other import get_pattern_key

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.workers.adapters.patterns import TOTAL_MATCH_S, Budget, Pattern

MODULES = [f"model.layers.{i}.{m}" for i in (0, 1, 11) for m in ("self_attn.q_proj", "mlp.gate_proj")]
PATTERNS = [
    "q_proj",
    "proj",
    "",
    ".q_proj",
    "q.proj",
    "1.self_attn.q_proj",
    "layers.1.self_attn.q_proj",
    "model.layers.1.mlp.gate_proj",
    "model",
    ".*",
    ".*q_proj",
    "(q|gate)_proj",
    r"model\.layers\.(1|11)\..*",
    r"^model\.layers\.\d\.[a-z_]+\.(?P<name>q|k)_proj$",
    r"[^.]+_proj",
    r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|gate_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.(?:(?:gate_proj)))",
    r"(?!.*mlp).*_proj",
    r".*(?<!gate)_proj",
    r"layers\.1{2}\..*",
    r"[]a-z.0-9_]*",
]


@pytest.mark.parametrize("text", PATTERNS)
def test_rules_equal_peft(text: str) -> None:
    pattern = Pattern(text, "rank_pattern")
    for module in MODULES:
        assert pattern.fullmatch(module, Budget()) == (re.fullmatch(text, module) is not None)
        assert pattern.matches_ending(module, Budget()) == (get_pattern_key([text], module) == text)


def test_only_what_a_pattern_computes_itself_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may wait for a processor for as long as it must, while others compute."""
    pattern, budget = Pattern(r"(q|gate)_proj", "rank_pattern"), Budget()
    compiled = pattern._compiled(r"(.*\.)?((q|gate)_proj)$")
    tries = iter([TimeoutError, TimeoutError])

    class Starved:
        def match(self, *arguments: Any, **options: Any) -> Any:
            for error in tries:
                raise error
            return compiled.match(*arguments, **options)

    monkeypatch.setattr(pattern, "_compiled", lambda _: Starved())
    assert pattern.matches_ending("model.layers.0.self_attn.q_proj", budget)


def test_what_a_pattern_computes_is_bounded_for_all_modules_together() -> None:
    pattern, budget = Pattern(r"(?:a|.|..|...)*Z?(?<!oj)", "target_modules"), Budget()
    started_s = time.thread_time()
    with pytest.raises(AdapterMalformed, match="backtracking"):
        [pattern.fullmatch(module, budget) for module in MODULES]
    assert time.thread_time() - started_s < 4 * TOTAL_MATCH_S
    with pytest.raises(AdapterMalformed, match="backtracking"):
        Pattern(r"(q|k)_proj", "target_modules").fullmatch("q_proj", budget)


@pytest.mark.parametrize(
    "text", ["(?i)q_proj", r"\x71", r"\N{DIGIT ONE}", "[[a-z]]", "q_proj{e<=2}", "[a--b]", "qﬁ", "(?R)", "(?#x)", r"\K"]
)
def test_what_re_and_regex_may_read_differently_is_refused(text: str) -> None:
    with pytest.raises(AdapterUnsupported, match="rank_pattern"):
        Pattern(text, "rank_pattern")
