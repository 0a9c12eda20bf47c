"""Runs a comparison in this process, on the same engine that serves. server_runner.py runs one on a server.

Drafts are trained on the answers of such an engine too (drafts/draft_target.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams, TokensPrompt
from lorafleet.protocol.engine_config import Device, DType
from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.examples import Example


class EngineRunner:
    """A Runner on an engine in this process.

    Args:
        model: Folder of the base model.
        adapters: The adapters' folders, by their names in the comparison.
        max_lora_rank: The largest rank that any of the adapters has.
    """

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        *,
        max_lora_rank: int,
        device: Device = "auto",
        dtype: DType = "auto",
        max_model_len: int | None = None,
    ) -> None:
        self._llm = LLM(
            str(model),
            enable_lora=True,
            max_loras=len(adapters),
            max_lora_rank=max_lora_rank,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
        )
        self._adapters = named_requests(adapters)
        try:
            for adapter in self._adapters.values():
                self._llm.add_lora(adapter)
        except BaseException:
            self._llm.close()
            raise

    def encode(self, example: Example) -> list[int]:
        return encoded_prompt(self._llm.tokenizer, example.prompt, example.messages)

    def encode_answer(self, text: str) -> list[int]:
        return self._llm.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._llm.tokenizer.decode(token_ids)

    def generate(self, name: str, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        done = self._llm.generate([_tokens(ids) for ids in prompts], params, self._adapters.get(name))
        return [output.outputs[0].token_ids for output in done]

    def score(self, name: str, sequences: Sequence[list[int]], top_k: int) -> list[list[TokenLogprobs | None]]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top_k)
        done = self._llm.generate([_tokens(ids) for ids in sequences], params, self._adapters.get(name))
        return [output.prompt_logprobs or [] for output in done]

    def close(self) -> None:
        self._llm.close()


def named_requests(adapters: Mapping[str, Path]) -> dict[str, LoRARequest]:
    """Returns what names each adapter to LLM, from the folders by name."""
    return {name: LoRARequest(name, number, str(folder)) for number, (name, folder) in enumerate(adapters.items(), 1)}


def encoded_prompt(tokenizer: Tokenizer, prompt: str, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """Returns the tokens of the messages, or of the prompt if there are none."""
    if not messages:
        return tokenizer.encode(prompt)
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def _tokens(token_ids: list[int]) -> TokensPrompt:
    return {"prompt_token_ids": token_ids}
