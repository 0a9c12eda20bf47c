"""The prompts for the demo's drafts: what `make demo-drafts` trains on and measures on."""

import json
import sys
from pathlib import Path

import draft_prompts
from world import split_world

from lorafleet.tools.drafts.draft_traffic import read_traffic


def test_prompts_are_read_by_the_command_and_the_others_were_held_out_of_all_training(tmp_path: Path, monkeypatch):
    folder = tmp_path / "drafts"
    monkeypatch.setattr(sys, "argv", ["draft_prompts.py", str(folder), "--prompts", "20", "--held-out", "10"])
    draft_prompts.main()
    assert len(read_traffic(folder / "prompts.jsonl")) == 20
    lines = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    asked = {line["messages"][0]["content"] for line in lines}
    assert len(asked) == 10
    assert asked <= {question.prompt for question in split_world().held_out}
    assert sorted(path.name for path in (folder / "adapters").iterdir()) == ["json", "pirate", "shout"]
