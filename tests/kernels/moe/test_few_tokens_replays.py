"""Quantized experts of few tokens in CUDA graphs that are replayed many times without a pause, as decode steps are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lorafleet.kernels.decoder.decoder_stack import captured
from lorafleet.kernels.moe.few_tokens import FewTokenMixture, few_token_mixture
from tests.kernels.harness import poison_free_memory
from tests.kernels.moe.test_few_tokens_codes import CODES, make_mixture

pytestmark = pytest.mark.gpu

HIDDEN, LAYERS, INPUTS, REPLAYS = 512, 3, 5, 500


def output_of(x_TD: Tensor, mixture: FewTokenMixture) -> Tensor:
    out = few_token_mixture(x_TD, mixture)
    assert out.sums is not None
    return out.sums.part_KTO


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("case", CODES)
def test_each_replay_has_the_bits_of_a_launch_of_its_own(case: str, tokens: int) -> None:
    """A launch changes counters and memory that all launches share, on which no later result may depend."""
    mixture = make_mixture(case, (HIDDEN, 192, 16), 4, "silu", 128, "cuda", early=True)
    dtype = mixture.router.router_ED.dtype
    generator = torch.Generator("cuda").manual_seed(tokens)
    inputs_LTD = [
        torch.randn(LAYERS, tokens, HIDDEN, device="cuda", generator=generator).div(HIDDEN**0.5).to(dtype)
        for _ in range(INPUTS)
    ]
    wanted = [torch.stack([output_of(x_TD, mixture) for x_TD in x_LTD]) for x_LTD in inputs_LTD]
    x_LTD = inputs_LTD[0].clone()
    found = torch.empty_like(wanted[0])

    def layers() -> None:
        for layer in range(LAYERS):
            found[layer].copy_(output_of(x_LTD[layer], mixture))

    graph = captured(layers)
    poison_free_memory()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(REPLAYS):
        x_LTD.copy_(inputs_LTD[replay % INPUTS])
        graph.replay()
        different += (found != wanted[replay % INPUTS]).any()
    assert different.item() == 0
