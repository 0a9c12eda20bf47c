"""Writes what `lorafleet train-draft` needs to train drafts for the demo.

    python demo/draft_prompts.py FOLDER

writes FOLDER/prompts.jsonl with prompts that the demo was trained on, and FOLDER/held_out.jsonl with others. It copies
the adapters to FOLDER/adapters, since drafts are written into their folders. `make demo-drafts` does the rest.
"""

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from chat import ask
from world import Question, split_world

DEMO = Path(__file__).parent


def main() -> None:
    """Write the prompts and copy the adapters."""
    parser = argparse.ArgumentParser(description="Write prompts to train and measure drafts of the demo on.")
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument("--prompts", type=int, default=400, help="prompts to train on")
    parser.add_argument("--held-out", type=int, default=100, help="prompts to measure on")
    args = parser.parse_args()
    shutil.copytree(DEMO / "adapters", args.folder / "adapters")
    split, rng = split_world(), random.Random(0)
    _write(args.folder / "prompts.jsonl", rng.sample(split.train, args.prompts))
    _write(args.folder / "held_out.jsonl", rng.sample(split.held_out, args.held_out))


def _write(path: Path, questions: Sequence[Question]) -> None:
    path.write_text("".join(json.dumps({"messages": ask(question.prompt)}) + "\n" for question in questions))


if __name__ == "__main__":
    main()
