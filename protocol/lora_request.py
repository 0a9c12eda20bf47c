"""The description of a request's adapter inside a replica. It knows nothing of HTTP names or of the contents of
files."""

from __future__ import annotations

import zlib

import msgspec

from lorafleet.protocol.errors import InvalidRequest


class SealedAdapter(msgspec.Struct, frozen=True):
    """Says where an adapter's content is in sealed memory (adapter_formats/sealed_memory.py).

    It is valid as long as the process that filled the memory keeps it open.
    """

    pid: int  # The process that filled it.
    descriptor: int  # Its file descriptor there.
    token: str  # Random part of the memory's name, since another process may get the same pid.
    weights_bytes: int  # Size of the safetensors file at the beginning.
    config_bytes: int  # Size of adapter_config.json after it.


class LoRARequest(msgspec.Struct, frozen=True):
    """One version of one adapter."""

    lora_name: str  # Public name, used in messages, logs and metrics only.
    # Positive. vLLM's field, for callers that number adapters themselves; adapters are identified by digest here.
    lora_int_id: int
    # Local folder with adapter_config.json and the weights, or a URI of them (resolvers/store.py) that every node can
    # open.
    lora_path: str
    # sha256 (hex) of config, weights and language files, or "" before they have been read. If it is given, bytes
    # under lora_path with another digest are rejected (AdapterChanged).
    digest: str = ""
    # Base for which the adapter was registered, shown as `parent`. None: the served base.
    base_model_name: str | None = None
    # Parts of a mix of several adapters (adapter_mix.py), which has no files of its own.
    parts: tuple[LoRAPart, ...] = ()
    # Real path of the folder in which a local lora_path must lie when it is read; None: anywhere. It is checked again
    # at that time, because a symlink may have been swapped since access was granted.
    within: str | None = None
    # Sealed memory of this node with the same content, from which it is read if it can be. Only set to load an adapter
    # that was just pushed.
    memory: SealedAdapter | None = None
    version: int = 0  # Number of the version in the catalogue. 0: it has none, as for a mix, or none yet.
    # The path or URI that the owner gave, or the name if there was none: model pages show it in the place of lora_path,
    # which may lie in a store of the server. "": lora_path is what the owner gave.
    origin: str = ""
    left_out: tuple[str, ...] = ()  # As AdapterInfo's, once the adapter was read; () before.


class LoRAPart(msgspec.Struct, frozen=True):
    """An adapter of a mix and its weight in the sum. The adapter is not a mix itself."""

    lora: LoRARequest
    weight: float


def adapter_number(lora_name: str) -> int:
    """Returns the lora_int_id of an adapter that only has a name: a positive int32, the same in every process.

    Adapters are identified by their digest, so a collision does no harm.
    """
    return 1 + zlib.crc32(lora_name.encode()) % (2**31 - 2)


def turn_group(tenant: str | None, lora: LoRARequest | None) -> str:
    """Returns the group of a request for fair scheduling of shared processes: its tenant, or without a tenant its
    adapter."""
    if tenant:
        return f"tenant {tenant}"
    return "" if lora is None else f"adapter {lora.digest or lora.lora_name}"


def check_generates(lora_name: str, head_task: str) -> None:
    """Raises InvalidRequest if an adapter with this AdapterInfo.head_task is not for generation."""
    if head_task:
        route = "/classify" if head_task == "classify" else "/pooling"
        raise InvalidRequest(
            f"adapter {lora_name!r} has a classification head and was not trained to generate. Use {route} with it, "
            "or /v1/embeddings.",
            "model",
        )


class AdapterInfo(msgspec.Struct, frozen=True):
    """The properties of an adapter that a worker determines when it reads and checks the adapter."""

    digest: str
    rank: int  # Largest rank of its modules.
    num_bytes: int  # Size of all its matrices in the serving dtype, summed over the GPUs that share them.
    target_modules: list[str]  # Leaf names, sorted: ["k_proj", "q_proj"].
    invocation_tokens: tuple[int, ...] = ()  # Token ids that activate an activated LoRA (workers/slots/activation.py).
    vocab_size: int | None = None  # Size of its own vocabulary. None: it uses the base's.
    language: str = ""  # language_digest of its tokenizer and chat template files.
    # Most tokens of a prompt and its answer together, if its files state it or a rope scaling. None: as the base.
    context_length: int | None = None
    # "classify" or "token_classify" if it has a classification head of its own, which it is for. "": it generates.
    head_task: str = ""
    # Its parts for pictures or sound, such as "visual", which are not served, since no text passes through them.
    left_out: tuple[str, ...] = ()
