"""Declares the settings of a process of grammar_program.py."""

from __future__ import annotations

from dataclasses import dataclass

# for the threads that compile and fill; deeper than the main thread's stack, on which trials run
STACK_BYTES = 64 << 20


@dataclass
class Settings:
    tokenizer: str  # path of the file that api/text/tokenizer_files.py wrote
    vocab_size: int  # the tokenizer's; the model's may be padded beyond it
    eos_token_ids: list[int]
    rows: int
    mask_fd: int
    num_threads: int
    trial_cpu_s: float
    trial_s: float
    trial_memory_bytes: int
    memory_bytes: int  # for all grammars
    max_trials: int  # trials at a time
    max_waiting: int  # grammars of one group that may wait for a trial
    finds_forced: bool  # whether forced tokens are told with the masks
