from __future__ import annotations

from pathlib import Path

import pytest

from lorafleet.cluster.quality.probes import MAX_PROBES, read_probes
from lorafleet.protocol.errors import ConfigError


def written(folder: Path, file: str, prompts: str = '{"prompt": "a"}\n') -> Path:
    (folder / "p.jsonl").write_text(prompts)
    path = folder / "probes.yaml"
    path.write_text(file)
    return path


def test_prompts_are_found_beside_the_file(tmp_path: Path) -> None:
    file = "interval_s: 60\nsets: [{model: sql, prompts: p.jsonl, max_tokens: 8}, {model: base, prompts: p.jsonl}]"
    probes = read_probes(written(tmp_path, file, '{"prompt": "a"}\n\n{"prompt": "b", "completion": "c"}\n'))
    assert (probes.interval_s, [(one.model, one.max_tokens) for one in probes.sets]) == (60, [("sql", 8), ("base", 32)])
    assert [(one.prompt, one.completion) for one in probes.sets[0].probes] == [("a", None), ("b", "c")]
    assert probes.sets[0].digest != probes.sets[1].digest


def test_another_prompt_makes_another_digest(tmp_path: Path) -> None:
    file = "sets: [{model: base, prompts: p.jsonl}]"
    digests = [read_probes(written(tmp_path, file, f'{{"prompt": "{text}"}}')).sets[0].digest for text in "aba"]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("file", "prompts", "message"),
    [
        ("sets: [{modle: a, prompts: p.jsonl}]", "", "sets.0: unknown key 'modle'; did you mean 'model'?"),
        ("intervals: 5\nsets: []", "", "unknown key 'intervals'; did you mean 'interval_s'?"),
        ("sets: []", "", "sets: "),
        ("interval_s: 0\nsets: [{model: a, prompts: p.jsonl}]", "", "interval_s: "),
        ("sets: [{model: a, prompts: p.jsonl}, {model: a, prompts: p.jsonl}]", "", "two sets for 'a'"),
        ("sets: [{model: a, prompts: no.jsonl}]", "", "no.jsonl, a file of the quality probes, cannot be read"),
        ("sets: [{model: a, prompts: p.jsonl}]", "\n", "p.jsonl has 0 prompts"),
        ("sets: [{model: a, prompts: p.jsonl}]", '{"prompt": "a"}\n' * (MAX_PROBES + 1), f"1 to {MAX_PROBES}"),
        ("sets: [{model: a, prompts: p.jsonl}]", '{"prompt": "a"}\n{', "p.jsonl, line 2 is not valid JSON"),
        ("sets: [{model: a, prompts: p.jsonl}]", '{"prompt": "a", "answer": "b"}', "line 1: unknown key 'answer'"),
        ("sets: [{model: a, prompts: p.jsonl}]", '{"prompt": ""}', "line 1: prompt: "),
        ("sets: {", "", "neither YAML nor JSON"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, file: str, prompts: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_probes(written(tmp_path, file, prompts))
    assert message in raised.value.message
