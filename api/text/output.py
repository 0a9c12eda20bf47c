"""Turns the engine's tokens of one sequence into the caller's view of it: text, visible tokens, finish reason.

The HTTP front and LLM both use it; it knows nothing of HTTP. If a stop string ends the answer, the caller aborts the
engine's sequence by closing its generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from lorafleet.api.text.detokenizer import make_detokenizer
from lorafleet.api.text.stop_strings import StopStrings
from lorafleet.api.text.token_table import TokenTable
from lorafleet.protocol.messages import FinishReason, TokenLogprobs, TokenOutput
from lorafleet.protocol.sampling_params import SamplingParams


class LogprobsSoFar(Protocol):
    """The logprobs of the tokens of an answer, in their order. All have equally many best tokens."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[TokenLogprobs]: ...


class Delta(msgspec.Struct):
    """The part that one engine output adds to the answer.

    token_ids, logprobs and offsets run in parallel, and each entry waits until its text is shown. They include the
    tokens of a stop string, but no later ones.
    """

    text: str = ""
    token_ids: list[int] = []
    embedding: bytes = b""  # float32, instead of tokens.
    logprobs: LogprobsSoFar | None = None
    offsets: list[int] = []  # Position in the answer where each token's text begins.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # The stop string, or the id of a stop_token_ids entry; None for eos.
    fallback_reason: str | None = None


class OutputProcessor:
    """The answer of one sequence so far. `num_tokens` counts the generated tokens, up to the one that completed a
    stop string."""

    def __init__(self, tokenizer: TokenTable, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._detokenizer = make_detokenizer(tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens)
        stops = params.stop_strings
        self._stops = StopStrings(stops, include=params.include_stop_str_in_output) if stops else None
        self._aligned = bool(stops) or params.logprobs is not None
        self._num_decoded = 0  # characters decoded, whether shown or held back
        self._num_shown = 0
        self._waiting: list[tuple[int, TokenLogprobs | None, int, int]] = []  # token, logprobs, start, end of its text

    def push(self, output: TokenOutput) -> Delta:
        """Returns what the output adds to the answer. It must not be called again once finish_reason is set."""
        assert self.finish_reason is None, "push after the end"
        delta = Delta(
            embedding=output.embedding,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            fallback_reason=output.fallback_reason,
        )
        if self._aligned:
            self._push_aligned(output, delta)
        else:
            self._push_plain(output, delta)
        if output.finish_reason is not None and self.finish_reason is None:
            self._finish(output, delta)
        return delta

    def _push_plain(self, output: TokenOutput, delta: Delta) -> None:
        shown = output.token_ids[:-1] if self._hides_last(output) else output.token_ids
        for token_id in shown:
            delta.text += self._detokenizer.push(token_id)
        delta.token_ids = output.token_ids
        self.num_tokens += len(output.token_ids)

    def _push_aligned(self, output: TokenOutput, delta: Delta) -> None:
        last = len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            hidden = i == last and self._hides_last(output)
            piece = "" if hidden else self._detokenizer.push(token_id)
            start = self._num_decoded
            self._num_decoded += len(piece)
            self.num_tokens += 1
            # Bytes of an incomplete character become visible with it, one character further on.
            end = self._num_decoded + self._detokenizer.pending
            self._waiting.append((token_id, output.logprobs[i] if output.logprobs else None, start, end))
            if self._show(piece, delta):
                break
        self._release(delta)

    def _show(self, piece: str, delta: Delta) -> bool:
        """Adds the text to the delta. Returns whether a stop string ended the answer."""
        stop = None
        if self._stops is not None:
            piece, stop = self._stops.push(piece, may_stop=self.num_tokens > self._params.min_tokens)
        delta.text += piece
        self._num_shown += len(piece)
        if stop is None:
            return False
        self.finish_reason = delta.finish_reason = "stop"
        delta.stop_reason = stop
        return True

    def _finish(self, output: TokenOutput, delta: Delta) -> None:
        if not self._show(self._detokenizer.finish(), delta):
            if self._stops is not None:
                rest = self._stops.flush()
                delta.text += rest
                self._num_shown += len(rest)
            self.finish_reason = delta.finish_reason = output.finish_reason
            if output.stop_token_id in (self._params.stop_token_ids or ()):
                delta.stop_reason = output.stop_token_id
        self._release(delta)

    def _release(self, delta: Delta) -> None:
        """Moves the tokens whose text is shown from waiting to the delta; at the end, moves all of them."""
        waiting = self._waiting
        count = len(waiting)
        if self.finish_reason is None:
            count = next((i for i, entry in enumerate(waiting) if entry[3] > self._num_shown), count)
        shown: list[TokenLogprobs] = []
        for token_id, logprobs, start, _ in waiting[:count]:
            delta.token_ids.append(token_id)
            delta.offsets.append(min(start, self._num_shown))
            if logprobs is not None:
                shown.append(logprobs)
        if shown:
            delta.logprobs = [*(delta.logprobs or ()), *shown]
        del waiting[:count]

    def _hides_last(self, output: TokenOutput) -> bool:
        """Returns whether the last token is hidden: the token that ended the answer is no part of its text, unless
        requested."""
        return output.stop_token_id is not None and not self._params.include_stop_str_in_output
