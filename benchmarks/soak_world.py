"""Makes the adapters of a soak on tiny_llama.py's model, and computes their answers.

The adapters cannot be mistaken for one another. The offline LLM class computes their greedy answers beforehand.
Adapters are public or belong to one of three tenants, most of whose adapters share the same names. Steady adapters
never change; moving ones get new versions with one of two contents; mortal ones are also removed and pushed again.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams, TokensPrompt
from lorafleet.protocol.messages import TokenLogprobs
from soak_truth import ABSENT, MIN_SURE, Answers, Truth
from tiny_llama import HIDDEN, INNER, KV, LAYERS

Kind = Literal["steady", "moving", "mortal"]

TENANTS = ("acme", "bolt", "coil")
KINDS: tuple[Kind, ...] = (
    "steady",
    "steady",
    "moving",
    "steady",
    "mortal",
    "steady",
    "steady",
    "moving",
    "steady",
    "steady",
)
ANSWER_TOKENS = 12
# Larger than any logit here, so that no token comes twice; a random model would otherwise end in repetition.
PENALTY = 2.0
SURE_GAP = 1e-4  # Difference of logprobs; a greedy token with a smaller lead may be another token in another batch.
CHAT = [{"role": "user", "content": "How long is a soak?"}]
MIXES = 6  # The number of mixes of each tenant.


@dataclass(slots=True)
class Adapter:
    """One adapter of a soak, and what it stands for at the moment."""

    tenant: str | None  # None stands for a public adapter.
    name: str
    kind: Kind
    rank: int
    # The weights by letter: "a", and "b" if the adapter changes.
    contents: dict[str, bytes] = field(default_factory=dict)
    truth: Truth = field(default_factory=lambda: Truth({}, ABSENT))
    letters: dict[int, str] = field(default_factory=dict)  # The letters of its versions' contents.
    num_moves: int = 0  # The number of moves of its alias.
    # The letters that the alias stands for: one, or several if it is split.
    stands_for: set[str] = field(default_factory=set)

    def packed(self, letter: str, tag: str) -> bytes:
        """Returns the adapter as a tar. Each tag makes it another version with the same answers."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:", format=tarfile.PAX_FORMAT) as tar:
            files = {
                "adapter_config.json": _config(self.rank, tag),
                "adapter_model.safetensors": self.contents[letter],
            }
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return packed.getvalue()


@dataclass(slots=True)
class World:
    """Holds all adapters of a soak, its prompts, and the answers of the base and of mixes."""

    adapters: list[Adapter]
    prompts: list[list[int]]  # Token ids; the first prompt is CHAT.
    base: Truth
    mixes: dict[str, list[tuple[str, Truth]]]  # The mixes of each tenant, by their name in a request's `model`.

    def seen_by(self, tenant: str) -> list[Adapter]:
        return [adapter for adapter in self.adapters if adapter.tenant in (None, tenant)]


def make_world(model: Path, num_adapters: int) -> World:
    """Makes the adapters, of which two in five are public."""
    share = num_adapters // 5
    adapters = _adapters(None, [f"pub-{i:02d}" for i in range(num_adapters - len(TENANTS) * share)])
    for tenant in TENANTS:
        num_own = share // 4  # Names that no other tenant has.
        names = [f"own-{i:02d}" for i in range(share - num_own)] + [f"{tenant}-{i:02d}" for i in range(num_own)]
        adapters += _adapters(tenant, names)
    random = np.random.default_rng(7)
    for adapter in adapters:
        for letter in "a" if adapter.kind == "steady" else "ab":
            adapter.contents[letter] = _weights(random, adapter.rank)
    chat = list(b"user: How long is a soak?\nassistant:")
    return _with_answers(model, adapters, chat)


def _adapters(tenant: str | None, names: Sequence[str]) -> list[Adapter]:
    return [Adapter(tenant, name, KINDS[i % len(KINDS)], rank=(4, 8, 16)[i % 3]) for i, name in enumerate(names)]


def _config(rank: int, tag: str) -> bytes:
    return json.dumps(
        {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 8 * rank,
            "target_modules": ["down_proj", "v_proj"],
            "base_model_name_or_path": tag,
        }
    ).encode()


def _weights(random: np.random.Generator, rank: int) -> bytes:
    """Returns large weights, so that no two adapters answer alike."""
    tensors = {}
    for layer, (module, rows, columns) in itertools.product(
        range(LAYERS), (("self_attn.v_proj", KV, HIDDEN), ("mlp.down_proj", HIDDEN, INNER))
    ):
        prefix = f"base_model.model.model.layers.{layer}.{module}"
        tensors[f"{prefix}.lora_A.weight"] = random.normal(0, 0.15, (rank, columns)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = random.normal(0, 0.05, (rows, rank)).astype(np.float32)
    return save(tensors)


def _with_answers(model: Path, adapters: list[Adapter], chat: list[int]) -> World:
    llm = LLM(
        str(model),
        enable_lora=True,
        max_loras=32,
        max_cpu_loras=64,
        kv_cache_tokens=1 << 15,
        cpu_threads=1,
        device="cpu",
    )
    random = np.random.default_rng(11)
    chat_ids = llm.tokenizer.encode(bytes(chat).decode())
    prompts = [chat_ids, *(random.integers(2, 258, length).tolist() for length in (8, 33, 70))]
    requests: dict[tuple[str, str], LoRARequest] = {}
    numbers = itertools.count(1)
    for adapter in adapters:
        for letter, weights in adapter.contents.items():
            number = next(numbers)
            path = model.parent / "contents" / str(number)
            path.mkdir(parents=True)
            (path / "adapter_config.json").write_bytes(_config(adapter.rank, "offline"))
            (path / "adapter_model.safetensors").write_bytes(weights)
            requests[f"{adapter.tenant}/{adapter.name}", letter] = LoRARequest(str(number), number, str(path))
    asked: dict[tuple[str, str], LoRARequest | None] = {("base", "base"): None, **requests}
    mixes: dict[str, list[str]] = {}
    for tenant in TENANTS:
        public, own = (
            [adapter for adapter in adapters if adapter.tenant == who and adapter.kind == "steady"]
            for who in (None, tenant)
        )
        for pair in itertools.islice(zip(itertools.cycle(own), reversed(public), strict=False), MIXES):
            parts = [requests[f"{adapter.tenant}/{adapter.name}", "a"] for adapter in pair]
            mixes.setdefault(tenant, []).append("+".join(adapter.name for adapter in pair))
            asked[tenant, mixes[tenant][-1]] = llm.mix_loras(parts)
    answers = dict(zip(asked, _greedy(llm, prompts, list(asked.values())), strict=True))
    llm.close()
    check_distinct(answers)
    for adapter in adapters:
        full = f"{adapter.tenant}/{adapter.name}"
        adapter.truth = Truth({letter: answers[full, letter] for letter in adapter.contents}, ABSENT)
    mixed = {
        tenant: [(name, Truth({"mix": answers[tenant, name]}, "mix")) for name in names]
        for tenant, names in mixes.items()
    }
    return World(adapters, prompts, Truth({"base": answers["base", "base"]}, "base"), mixed)


def _greedy(llm: LLM, prompts: list[list[int]], loras: Sequence[LoRARequest | None]) -> list[Answers]:
    """Returns the answers of each adapter to every prompt, as far as they are certain."""
    jobs = [(prompt, lora) for lora in loras for prompt in prompts]
    params = SamplingParams(
        temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=20, presence_penalty=PENALTY
    )
    results = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in jobs], params, [lora for _, lora in jobs]
    )
    found: list[Answers] = []
    for number, result in enumerate(results):
        output = result.outputs[0]
        assert output.logprobs is not None
        gaps = (_gap(entry, output.token_ids[:i]) for i, entry in enumerate(output.logprobs))
        num_sure = sum(1 for _ in itertools.takewhile(lambda gap: gap > SURE_GAP, gaps))
        if number % len(prompts) == 0:
            found.append([])
        found[-1].append(tuple(output.token_ids[:num_sure]))
    return found


def _gap(entry: TokenLogprobs, before: Sequence[int]) -> float:
    """Returns the difference between the two likeliest tokens that the penalty allows."""
    allowed = zip(entry.top_ids, entry.top_logprobs, strict=True)
    first, second, *_ = (logprob for token_id, logprob in allowed if token_id not in before)
    return first - second


def check_distinct(answers: dict[tuple[str, str], Answers]) -> None:
    """Exits unless every prompt shows whether a wrong adapter has answered it."""
    for (name, ours), (other, theirs) in itertools.combinations(answers.items(), 2):
        for prompt, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            length = min(len(a), len(b))
            if length >= MIN_SURE and a[:length] == b[:length]:
                raise SystemExit(f"{name} and {other} answer prompt {prompt} alike: {a[:length]}. Take other weights.")
