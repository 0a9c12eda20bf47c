from __future__ import annotations

import importlib.util

import pytest
import torch

from quantized_linears import SCHEMES
from quantized_peers import PEERS, gptq_words, marlin_int4


def test_every_peer_is_compared_with_a_kind_of_ours() -> None:
    assert {ours for ours, _ in PEERS.values()} <= SCHEMES.keys()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_word_has_the_codes_of_neighboring_inputs_the_first_one_lowest(bits: int) -> None:
    code_OD = torch.randint(0, 1 << bits, (6, 64), dtype=torch.uint8)
    code_OD[0] = (1 << bits) - 1  # words whose highest bit is set
    word_DO = gptq_words(code_OD, bits)
    in_word = 32 // bits
    assert word_DO.dtype == torch.int32 and word_DO.shape == (64 // in_word, 6)
    for d in range(64):
        shifted_O = word_DO[d // in_word] >> (bits * (d % in_word))
        assert torch.equal(shifted_O & ((1 << bits) - 1), code_OD[:, d].int())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_peer_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        marlin_int4(torch.randn(64, 128))
