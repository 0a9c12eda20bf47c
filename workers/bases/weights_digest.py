"""Computes a digest of a model's weights as they are in memory.

Files say less: a trainer may write other weights with the same size and times, or the same weights as other files. On a
GPU, where all of its memory is read in a fraction of a second, each piece of the weights has two sums of its words,
each word times a random number (multilinear hashing). Two different pieces have the same sums with a probability of
about 2**-64. That suffices to notice a change; it is no protection against somebody who looks for a collision.
"""

# K words of a piece

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

PIECE_WORDS = 1 << 20  # Words of 4 bytes that are multiplied at a time. They take 16 bytes more each meanwhile.
SEED = 20541  # The random numbers are the same in all processes, so that replicas have equal digests.
DIGEST_CHARS = 32
THREADS = 4  # Threads that hash what is in a CPU's memory.


@torch.inference_mode()
def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Returns 128 bits, in hex, of the tensors' names, dtypes, shapes and values."""
    tensors = [(name, tensor.detach().contiguous()) for name, tensor in named]
    on_gpu = next((tensor.device for _, tensor in tensors if tensor.device.type == "cuda"), None)
    factors = [] if on_gpu is None else [factor_K.to(on_gpu) for factor_K in _factors()]
    summed = hashlib.sha256()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as threads:
        hashed = {name: threads.submit(_sha256, tensor) for name, tensor in tensors if tensor.device.type == "cpu"}
        for name, tensor in tensors:
            content = hashed[name].result() if name in hashed else _sums(tensor, factors)
            summed.update(repr((name, str(tensor.dtype), tuple(tensor.shape), content)).encode())
    return summed.hexdigest()[:DIGEST_CHARS]


def digest_of_ranks(digests: Iterable[str]) -> str:
    """Returns the digest of a model whose parts, in the order of their ranks, have these digests."""
    own = list(digests)
    return own[0] if len(own) == 1 else hashlib.sha256(" ".join(own).encode()).hexdigest()[:DIGEST_CHARS]


def _sha256(tensor: Tensor) -> str:
    content = _bytes(tensor)
    # numpy() would make the storage one that cannot be resized, and the weights could not sleep.
    return hashlib.sha256((ctypes.c_char * content.numel()).from_address(content.data_ptr())).hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _factors() -> list[Tensor]:
    """Returns two rows of random odd numbers, int64 [K]."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(-(2**62), 2**62, (PIECE_WORDS,), generator=generator) * 2 + 1 for _ in range(2)]


def _sums(tensor: Tensor, factors: list[Tensor]) -> list[list[int]]:
    """Returns the two sums of each piece, modulo 2**64."""
    content = _bytes(tensor)
    rest = content.numel() % 4
    words = content[: content.numel() - rest].clone() if content.data_ptr() % 4 else content[: content.numel() - rest]
    pieces = [*words.view(torch.int32).split(PIECE_WORDS), content[content.numel() - rest :]]
    sums = [
        torch.stack([(factor_K[: len(piece)] * piece.long()).sum() for factor_K in factors])
        for piece in pieces
        if len(piece)
    ]
    return torch.stack(sums).tolist() if sums else []
