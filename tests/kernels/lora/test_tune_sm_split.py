from __future__ import annotations

import pytest

from lorafleet.kernels.lora.sm_split import UNSPLIT, SMSplit, StepClass
from lorafleet.kernels.lora.tune_sm_split import ALL_CASES, CASES, Measured, SplitCase, candidates, require_gemms

STEP = StepClass(64, "many", wide=False)


def test_cases_are_read_from_their_names() -> None:
    assert SplitCase.parse("64x8") == SplitCase("64x8", 64, 8, (16,))
    mixed = SplitCase.parse("64x32-mixed")
    assert (mixed.num_tokens, mixed.num_adapters) == (64, 32)
    assert mixed.rank_of_slot[:5] == [8, 16, 32, 64, 8]


@pytest.mark.parametrize("name", ["64", "64x", "64x8x2", "0x1", "64x65", "64x8-other"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        SplitCase.parse(name)


def test_every_named_case_can_be_parsed_and_mixed_ranks_come_last() -> None:
    assert set(CASES) <= set(ALL_CASES)
    for names in (CASES, ALL_CASES):
        ranks = [len(SplitCase.parse(name).ranks) for name in names]
        assert ranks == sorted(ranks)


def test_an_h200_tries_these_numbers_of_sms_in_both_orders() -> None:
    splits = candidates(132)
    assert splits[0] == UNSPLIT
    assert len(splits) == len(set(splits)) == 15
    assert {split.gemm_sms for split in splits} == {None, 116, 108, 100, 96, 88, 80}
    assert candidates(40)[-1] == SMSplit(16, "lora"), "a small GPU keeps enough SMs for its GEMMs"


def test_gemms_of_kernels_of_our_own_try_other_numbers_of_sms() -> None:
    assert {split.gemm_sms for split in candidates(132, "four bits")} == {None, *range(100, 129, 4)}
    assert candidates(132, "e4m3") == [UNSPLIT, SMSplit(None, "gemm"), SMSplit(None, "lora")]


def test_a_split_is_chosen_only_if_it_wins_more_than_the_noise() -> None:
    split = SMSplit(88, "gemm")
    assert Measured(STEP, 5.0, {}, {UNSPLIT: 7.0, split: 6.99}).best == UNSPLIT
    assert Measured(STEP, 5.0, {}, {UNSPLIT: 7.0, split: 6.9, SMSplit(96, "gemm"): 6.95}).best == split


def test_a_base_whose_steps_are_never_split_is_refused_with_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"--base fp8: .* compute capability 9\.0"):
        require_gemms(None, "fp8")
    assert require_gemms("e4m3", "fp8") == "e4m3"
