"""How a request names its adapter inside a replica. Knows nothing of HTTP names or files' contents."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """One version of one adapter.

    lora_name: public name, used in messages, logs and metrics only.
    lora_int_id: positive; for callers that number adapters themselves (vLLM's field). Identity here is the digest.
    lora_path: local folder with adapter_config.json and the weights, or their URI (resolvers/store.py), which every
        node can open.
    digest: sha256 (hex) of config and weights, once they have been read; "" before. Where it is given, bytes under
        lora_path with another digest are refused (AdapterChanged).
    base_model_name: the base the adapter was registered for, shown as `parent`; None means the served base.
    within: real path of the folder that a local lora_path must lie in when it is read; None: anywhere. A symlink may
        have been swapped since whoever asked was allowed to have it read.
    parts: of a mix of several adapters (adapter_mix.py), which has no files of its own.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    digest: str = ""
    base_model_name: str | None = None
    parts: tuple[LoRAPart, ...] = ()
    within: str | None = None


class LoRAPart(msgspec.Struct, frozen=True):
    """Of a mix: an adapter, itself no mix, and what its part of the sum is multiplied by."""

    lora: LoRARequest
    weight: float


def turn_group(tenant: str | None, lora: LoRARequest | None) -> str:
    """Whose turn a request takes where many share few processes: its tenant's; or its adapter's, where it has none."""
    if tenant:
        return f"tenant {tenant}"
    return "" if lora is None else f"adapter {lora.digest or lora.lora_name}"


class AdapterInfo(msgspec.Struct, frozen=True):
    """What a worker found out about an adapter when it read and checked it."""

    digest: str
    rank: int  # the largest of its modules' ranks
    num_bytes: int  # of all its matrices in the serving dtype, over however many GPUs they are divided
    target_modules: list[str]  # leaf names, sorted: ["k_proj", "q_proj"]
    invocation_tokens: tuple[int, ...] = ()  # of an activated LoRA, workers/slots/activation.py
    vocab_size: int | None = None  # where it has a vocabulary of its own; None: the base's
    language: str = ""  # language_digest of the files of a tokenizer or chat template beside it
