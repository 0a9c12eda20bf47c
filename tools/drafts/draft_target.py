"""Runs the target of a draft, a base and its adapters, on the same engine that serves: it tokenizes prompts and answers
them in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.offline.llm import LLM, SamplingParams, TokensPrompt
from lorafleet.protocol.engine_config import Device, DType
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.tools.drafts.draft_traffic import TrafficLine
from lorafleet.tools.engine_runner import encoded_prompt, named_requests


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """The tokens of a prompt and of the target's answer to it."""

    prompt: Sequence[int]
    answer: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


class DraftTarget:
    """A base and its adapters on an engine in this process. The base's name is BASE.

    Args:
        model: Folder of the base model.
        adapters: The adapters' folders by name.
        max_lora_rank: The largest rank that any of the adapters has.
        max_length: Largest number of tokens of a prompt and its answer together.
        gpu_memory_utilization: As LLM's. The rest of the GPU's memory is for the training.
    """

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        *,
        max_lora_rank: int,
        max_length: int,
        gpu_memory_utilization: float,
        device: Device = "auto",
        dtype: DType = "auto",
    ) -> None:
        for_adapters: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": len(adapters),
            "max_lora_rank": max_lora_rank,
        }
        self._llm = LLM(
            str(model),
            device=device,
            dtype=dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            **(for_adapters if adapters else {}),
        )
        self._max_length = max_length
        self._adapters = named_requests(adapters)
        try:
            self._own_language = frozenset(name for name in adapters if self._has_own_language(name))
        except BaseException:
            self._llm.close()
            raise

    def known_answers(self, name: str, lines: Iterable[TrafficLine]) -> list[TargetAnswer]:
        """Returns the answers that the lines have."""
        return [TargetAnswer(self.prompt_tokens(name, line), self._answer_tokens(line)) for line in lines]

    def answers(
        self, name: str, lines: Sequence[TrafficLine], max_tokens: int, *, temperature: float, seed: int
    ) -> list[TargetAnswer]:
        """Returns a new answer to each prompt, greedy if the temperature is 0."""
        prompts = [self.prompt_tokens(name, line) for line in lines]
        fitting = [prompt for prompt in prompts if len(prompt) < self._max_length]
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=min(max_tokens, self._max_length - len(prompt)), seed=seed + number
            )
            for number, prompt in enumerate(fitting)
        ]
        given: list[TokensPrompt] = [{"prompt_token_ids": list(prompt)} for prompt in fitting]
        done = self._llm.generate(given, params, self._adapters.get(name))
        return [TargetAnswer(prompt, output.outputs[0].token_ids) for prompt, output in zip(fitting, done, strict=True)]

    def prompt_tokens(self, name: str, line: TrafficLine) -> Sequence[int]:
        if line.prompt_ids:
            return line.prompt_ids
        if name in self._own_language:
            raise InvalidRequest(
                f"{line.place}: adapter {name!r} has its own tokenizer or chat template. Give it recorded requests "
                "whose responses have prompt_token_ids (return_token_ids)."
            )
        return encoded_prompt(self._llm.tokenizer, line.prompt, line.messages)

    def close(self) -> None:
        self._llm.close()

    def _answer_tokens(self, line: TrafficLine) -> Sequence[int]:
        if line.answer_ids:
            return line.answer_ids
        tokenizer = self._llm.tokenizer
        ids = tokenizer.encode(line.answer or "", add_special_tokens=False)
        end = tokenizer.eos_token_id
        return ids if end is None else [*ids, end]

    def _has_own_language(self, name: str) -> bool:
        self._llm.add_lora(self._adapters[name])
        return self._llm.has_own_language(self._adapters[name])
