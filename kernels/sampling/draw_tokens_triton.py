"""Draws tokens in one launch, without sorting. kernels/sampling/draw_tokens.py has its twin.

Idea: one program for each row reads the row a few times.
1. It applies the penalties and finds the best token. That is the answer if the temperature is 0.
2. A token's distance is how far its logit lies below the best one's, divided by the temperature. The tokens up to a
   cut are kept: all with smaller distances, and the first few of those at the cut. Non-negative floats have the order
   of their bits, so the cut is an integer key between 0 and LAST_KEY. Each pass counts and weighs the tokens up to
   four keys around the likely cut. Once few tokens lie between the bounds, each is compared with all of them. top_k
   counts tokens, top_p weighs what top_k has left.
3. The weights of groups of tokens are summed, and the draw falls into one group. A warp sums a group, so that no
   thread waits for another warp.

The best logit, the cut and what else decides whether a token is kept are stored for each row, from which
kernels/sampling/kept_bounds.py computes the probabilities of the kept tokens.

Memory: logits are [B, V] with a stride between rows. Each pass reads V logits of a row, which lie in L2 for small
batches. The table is float64 [B, F], fields as in DrawFields. counts are int32 [S, C].
"""

# B rows of logits · V vocabulary, or tokens of a block · F fields of a row · S rows of counts · C their vocabulary ·
# N tokens near the cut · R groups of a block · W tokens of a group · G groups of a row

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.sampling.draw_tokens import NUM_FIELDS
from lorafleet.kernels.sampling.kept_bounds import NUM_BOUNDS, KeptBounds
from lorafleet.kernels.sampling.penalties import IN_PROMPT

IN_PROMPT_BIT = tl.constexpr(IN_PROMPT)
BLOCK_V, NUM_WARPS = 4096, 16  # the fastest of those tried on an H200, for few rows and for many
LAST_KEY = tl.constexpr(0x7F7FFFFF)  # bits of the largest finite float32; infinity's are one more
MAX_NEAR = tl.constexpr(512)  # tokens near the cut, which are compared with each other
UNROLLED = tl.constexpr(8)
# Bits of 2, 6 and 14: most distances of logits lie between these.
KEY_2 = tl.constexpr(0x40000000)
KEY_6 = tl.constexpr(0x40C00000)
KEY_14 = tl.constexpr(0x41600000)


@jit()
def _penalized(
    logit_V: tl.tensor,
    count_V: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
) -> tl.tensor:
    repeated_V = tl.where(logit_V > 0, tl.div_rn(logit_V, repetition), logit_V * repetition)
    generated_V = count_V & (IN_PROMPT_BIT - 1)
    before_V = tl.where(count_V > 0, repeated_V, logit_V)
    return tl.where(generated_V > 0, before_V - (generated_V.to(tl.float32) * frequency + presence), before_V)


@jit()
def _load(row_ptr: tl.tensor, tokens: tl.tensor, num_tokens: tl.tensor) -> tl.tensor:
    """Returns the logits of these tokens. Each pass loads a block ahead of the one that it computes with, since nothing
    else hides the latency of few programs."""
    return tl.load(row_ptr + tokens, mask=tokens < num_tokens, other=float("-inf"))


@jit()
def _find_best(
    row_ptr: tl.tensor,
    num_tokens: tl.tensor,
    edited_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_counted: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    penalizes: tl.constexpr,
    block_v: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the largest logit and the first token that has it. If `penalizes`, writes the row with its penalties."""
    lane_V = tl.arange(0, block_v)
    best_V = tl.full([block_v], float("-inf"), tl.float32)
    first_V = lane_V
    ahead_V = _load(row_ptr, lane_V, num_tokens)
    if penalizes:
        count_ahead_V = tl.load(counts_ptr + lane_V, mask=lane_V < num_counted, other=0)
    for start in range(0, num_tokens, block_v):
        token_V = start + lane_V
        logit_V = ahead_V.to(tl.float32)
        ahead_V = _load(row_ptr, token_V + block_v, num_tokens)
        if penalizes:
            count_V = count_ahead_V
            count_ahead_V = tl.load(counts_ptr + token_V + block_v, mask=token_V + block_v < num_counted, other=0)
            logit_V = _penalized(logit_V, count_V, repetition, presence, frequency)
            tl.store(edited_ptr + token_V, logit_V, mask=token_V < num_tokens)
        is_better_V = logit_V > best_V
        best_V = tl.where(is_better_V, logit_V, best_V)
        first_V = tl.where(is_better_V, token_V, first_V)
    if penalizes:
        tl.debug_barrier()  # other threads read what this one has written
    best = tl.max(best_V, axis=0)
    return best, tl.min(tl.where(best_V == best, first_V, num_tokens), axis=0)


@jit()
def _distances(logits: tl.tensor, coldness: tl.tensor, best: tl.tensor, farthest: tl.tensor) -> tl.tensor:
    """Returns the distances of tokens with these logits. It is infinite for those that min_p drops, and for NaN."""
    distances = (best - logits.to(tl.float32)) * coldness
    return tl.where((distances >= 0) & (distances <= farthest), distances, float("inf"))


@jit()
def _add_sums(
    count_a: tl.tensor, count_b: tl.tensor, count_c: tl.tensor, count_d: tl.tensor,
    mass_a: tl.tensor, mass_b: tl.tensor, mass_c: tl.tensor, mass_d: tl.tensor,
    count_e: tl.tensor, count_f: tl.tensor, count_g: tl.tensor, count_h: tl.tensor,
    mass_e: tl.tensor, mass_f: tl.tensor, mass_g: tl.tensor, mass_h: tl.tensor,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    return (
        count_a + count_e, count_b + count_f, count_c + count_g, count_d + count_h,
        mass_a + mass_e, mass_b + mass_f, mass_c + mass_g, mass_d + mass_h,
    )  # fmt: skip


@jit()
def _sum_up_to(
    row_ptr: tl.tensor,
    num_tokens: tl.tensor,
    coldness: tl.tensor,
    best: tl.tensor,
    farthest: tl.tensor,
    key_1: tl.tensor,
    key_2: tl.tensor,
    key_3: tl.tensor,
    key_4: tl.tensor,
    block_v: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Returns the number of tokens up to each of four keys, and then their weights."""
    lane_V = tl.arange(0, block_v)
    count_1, count_2 = tl.zeros([block_v], tl.int32), tl.zeros([block_v], tl.int32)
    count_3, count_4 = tl.zeros([block_v], tl.int32), tl.zeros([block_v], tl.int32)
    mass_1, mass_2 = tl.zeros([block_v], tl.float32), tl.zeros([block_v], tl.float32)
    mass_3, mass_4 = tl.zeros([block_v], tl.float32), tl.zeros([block_v], tl.float32)
    ahead_V = _load(row_ptr, lane_V, num_tokens)
    for start in range(0, num_tokens, block_v):
        distance_V = _distances(ahead_V, coldness, best, farthest)
        ahead_V = _load(row_ptr, start + block_v + lane_V, num_tokens)
        key_V = distance_V.to(tl.int32, bitcast=True)
        weight_V = tl.exp(-distance_V)
        count_1 += (key_V <= key_1).to(tl.int32)
        count_2 += (key_V <= key_2).to(tl.int32)
        count_3 += (key_V <= key_3).to(tl.int32)
        count_4 += (key_V <= key_4).to(tl.int32)
        mass_1 += tl.where(key_V <= key_1, weight_V, 0.0)
        mass_2 += tl.where(key_V <= key_2, weight_V, 0.0)
        mass_3 += tl.where(key_V <= key_3, weight_V, 0.0)
        mass_4 += tl.where(key_V <= key_4, weight_V, 0.0)
    count_1, count_2, count_3, count_4, mass_1, mass_2, mass_3, mass_4 = tl.reduce(
        (count_1, count_2, count_3, count_4, mass_1, mass_2, mass_3, mass_4), 0, _add_sums
    )
    return count_1, count_2, count_3, count_4, mass_1, mass_2, mass_3, mass_4


@jit()
def _add_four(
    sum_a: tl.tensor, sum_b: tl.tensor, sum_c: tl.tensor, sum_d: tl.tensor,
    sum_e: tl.tensor, sum_f: tl.tensor, sum_g: tl.tensor, sum_h: tl.tensor,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    return sum_a + sum_e, sum_b + sum_f, sum_c + sum_g, sum_d + sum_h


@jit()
def _narrow(
    low: tl.tensor,
    low_count: tl.tensor,
    low_mass: tl.tensor,
    high: tl.tensor,
    high_count: tl.tensor,
    high_mass: tl.tensor,
    key: tl.tensor,
    count: tl.tensor,
    mass: tl.tensor,
    target: tl.tensor,
    by_mass: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Returns the bounds of the cut, with what is known of a key between them."""
    is_reached = tl.where(by_mass, mass, count.to(tl.float32)) >= target
    is_inside = (key > low) & (key < high)
    raises = is_inside & (is_reached == 0)
    lowers = is_inside & is_reached
    return (
        tl.where(raises, key, low),
        tl.where(raises, count, low_count),
        tl.where(raises, mass, low_mass),
        tl.where(lowers, key, high),
        tl.where(lowers, count, high_count),
        tl.where(lowers, mass, high_mass),
    )


@jit()
def _narrow_by_four(
    low: tl.tensor, low_count: tl.tensor, low_mass: tl.tensor,
    high: tl.tensor, high_count: tl.tensor, high_mass: tl.tensor,
    key_1: tl.tensor, key_2: tl.tensor, key_3: tl.tensor, key_4: tl.tensor,
    count_1: tl.tensor, count_2: tl.tensor, count_3: tl.tensor, count_4: tl.tensor,
    mass_1: tl.tensor, mass_2: tl.tensor, mass_3: tl.tensor, mass_4: tl.tensor,
    target: tl.tensor,
    by_mass: tl.tensor,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Returns the bounds of the cut, with what _sum_up_to has found of four keys. Keys that are not between the bounds
    change nothing."""
    low, low_count, low_mass, high, high_count, high_mass = _narrow(
        low, low_count, low_mass, high, high_count, high_mass, key_1, count_1, mass_1, target, by_mass
    )
    low, low_count, low_mass, high, high_count, high_mass = _narrow(
        low, low_count, low_mass, high, high_count, high_mass, key_2, count_2, mass_2, target, by_mass
    )
    low, low_count, low_mass, high, high_count, high_mass = _narrow(
        low, low_count, low_mass, high, high_count, high_mass, key_3, count_3, mass_3, target, by_mass
    )
    low, low_count, low_mass, high, high_count, high_mass = _narrow(
        low, low_count, low_mass, high, high_count, high_mass, key_4, count_4, mass_4, target, by_mass
    )
    return low, low_count, low_mass, high, high_count, high_mass


@jit()
def _choose_keys(
    low: tl.tensor,
    low_sum: tl.tensor,
    high: tl.tensor,
    high_sum: tl.tensor,
    target: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Returns four keys between the bounds. Two enclose the cut if the sums grow evenly between the bounds; the others
    halve what is left. If the bounds are far apart, the keys are equally far from each other."""
    step = (high - low) // 5
    nearest = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    width = high.to(tl.float32, bitcast=True) - nearest
    part = tl.minimum(tl.maximum((target - low_sum) / (high_sum - low_sum), 0.0), 1.0)
    margin = tl.where(width < 1, 0.015, 0.06)
    before = nearest + tl.maximum(part - margin, 0.0) * width
    behind = nearest + tl.minimum(part + margin, 1.0) * width
    is_wide = width > 3 * nearest
    key_2 = tl.where(is_wide, low + 2 * step, before.to(tl.int32, bitcast=True))
    key_3 = tl.where(is_wide, low + 3 * step, behind.to(tl.int32, bitcast=True))
    key_1 = tl.where(is_wide, low + step, low + (key_2 - low) // 2)
    key_4 = tl.where(is_wide, low + 4 * step, key_3 + (high - key_3) // 2)
    first, last = low + 1, high - 1
    return (
        tl.minimum(tl.maximum(key_1, first), last),
        tl.minimum(tl.maximum(key_2, first), last),
        tl.minimum(tl.maximum(key_3, first), last),
        tl.minimum(tl.maximum(key_4, first), last),
    )


@jit()
def _gather_near(
    near_ptr: tl.tensor,
    row_ptr: tl.tensor,
    num_tokens: tl.tensor,
    coldness: tl.tensor,
    best: tl.tensor,
    farthest: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    block_v: tl.constexpr,
) -> tl.tensor:
    """Stores the distances above low, up to high, in any order, and returns them. The rest of the MAX_NEAR places is
    infinite."""
    lane_V = tl.arange(0, block_v)
    lane_N = tl.arange(0, MAX_NEAR)
    tl.debug_barrier()  # what an earlier call has stored may still be read
    tl.store(near_ptr + lane_N, tl.full([MAX_NEAR], float("inf"), tl.float32))
    # Each lane counts its own tokens, so that their places need one sum over lanes and not one in each block.
    count_V = tl.zeros([block_v], tl.int32)
    ahead_V = _load(row_ptr, lane_V, num_tokens)
    for start in range(0, num_tokens, block_v):
        key_V = _distances(ahead_V, coldness, best, farthest).to(tl.int32, bitcast=True)
        ahead_V = _load(row_ptr, start + block_v + lane_V, num_tokens)
        count_V += ((key_V > low) & (key_V <= high)).to(tl.int32)
    place_V = tl.cumsum(count_V, axis=0) - count_V
    tl.debug_barrier()
    ahead_V = _load(row_ptr, lane_V, num_tokens)
    for start in range(0, num_tokens, block_v):
        distance_V = _distances(ahead_V, coldness, best, farthest)
        ahead_V = _load(row_ptr, start + block_v + lane_V, num_tokens)
        key_V = distance_V.to(tl.int32, bitcast=True)
        is_near_V = (key_V > low) & (key_V <= high)
        tl.store(near_ptr + place_V, distance_V, mask=is_near_V)
        place_V += is_near_V.to(tl.int32)
    tl.debug_barrier()
    return tl.load(near_ptr + lane_N)


@jit()
def _find_cut(
    near_ptr: tl.tensor,
    row_ptr: tl.tensor,
    num_tokens: tl.tensor,
    coldness: tl.tensor,
    best: tl.tensor,
    farthest: tl.tensor,
    low: tl.tensor,
    low_count: tl.tensor,
    low_mass: tl.tensor,
    high: tl.tensor,
    high_count: tl.tensor,
    high_mass: tl.tensor,
    target: tl.tensor,
    by_mass: tl.tensor,
    block_v: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Returns the smallest key up to which tokens reach the target, with the number and weight of the tokens below
    it, and of those up to it."""
    while (high - low > 1) & (high_count - low_count > MAX_NEAR):
        low_sum = tl.where(by_mass, low_mass, low_count.to(tl.float32))
        high_sum = tl.where(by_mass, high_mass, high_count.to(tl.float32))
        key_1, key_2, key_3, key_4 = _choose_keys(low, low_sum, high, high_sum, target)
        count_1, count_2, count_3, count_4, mass_1, mass_2, mass_3, mass_4 = _sum_up_to(
            row_ptr, num_tokens, coldness, best, farthest, key_1, key_2, key_3, key_4, block_v
        )
        low, low_count, low_mass, high, high_count, high_mass = _narrow_by_four(
            low, low_count, low_mass, high, high_count, high_mass, key_1, key_2, key_3, key_4,
            count_1, count_2, count_3, count_4, mass_1, mass_2, mass_3, mass_4, target, by_mass,
        )  # fmt: skip
    if high - low > 1:
        distance_N = _gather_near(near_ptr, row_ptr, num_tokens, coldness, best, farthest, low, high, block_v)
        key_N = distance_N.to(tl.int32, bitcast=True)
        weight_N = tl.exp(-distance_N)
        sum_N = tl.zeros([MAX_NEAR], tl.float32) + tl.where(by_mass, low_mass, low_count.to(tl.float32))
        for first in range(0, high_count - low_count, UNROLLED):
            for i in tl.static_range(UNROLLED):
                distance = tl.load(near_ptr + first + i)
                summand = tl.where(by_mass, tl.exp(-distance), 1.0)
                sum_N += tl.where(distance.to(tl.int32, bitcast=True) <= key_N, summand, 0.0)
        high = tl.min(tl.where(sum_N >= target, key_N, high), axis=0)
        num_below, num_up_to, mass_below, mass_up_to = tl.reduce(
            (
                (key_N < high).to(tl.int32),
                (key_N <= high).to(tl.int32),
                tl.where(key_N < high, weight_N, 0.0),
                tl.where(key_N <= high, weight_N, 0.0),
            ),
            0,
            _add_four,
        )
        high_count, high_mass = low_count + num_up_to, low_mass + mass_up_to
        low_count, low_mass = low_count + num_below, low_mass + mass_below
    return high, low_count, low_mass, high_count, high_mass


@jit()
def _draw_kept(
    sums_ptr: tl.tensor,
    num_tied_ptr: tl.tensor,
    row_ptr: tl.tensor,
    num_tokens: tl.tensor,
    coldness: tl.tensor,
    best: tl.tensor,
    farthest: tl.tensor,
    cut: tl.tensor,
    num_left: tl.tensor,
    draw: tl.tensor,
    row_groups: tl.constexpr,
    num_groups: tl.constexpr,
    block_v: tl.constexpr,
) -> tl.tensor:
    """Returns the token on which the draw falls, of those before the cut and the first num_left at it, or -1 if there
    is none."""
    width: tl.constexpr = block_v // num_groups
    group_R = tl.arange(0, num_groups)
    lane_RW = group_R[:, None] * width + tl.arange(0, width)[None, :]
    ahead_RW = _load(row_ptr, lane_RW, num_tokens)
    for start in range(0, num_tokens, block_v):
        distance_RW = _distances(ahead_RW, coldness, best, farthest)
        ahead_RW = _load(row_ptr, start + block_v + lane_RW, num_tokens)
        key_RW = distance_RW.to(tl.int32, bitcast=True)
        sum_R = tl.sum(tl.where(key_RW < cut, tl.exp(-distance_RW), 0.0), axis=1)
        tl.store(sums_ptr + start // width + group_R, sum_R)
        tl.store(num_tied_ptr + start // width + group_R, tl.sum((key_RW == cut).to(tl.int32), axis=1))
    tl.debug_barrier()
    # Tokens at the cut have one weight. Infinite distances have none.
    weight_at_cut = tl.exp(-cut.to(tl.float32, bitcast=True)).to(tl.float64)
    group_G = tl.arange(0, row_groups)
    is_group_G = group_G < tl.cdiv(num_tokens, block_v) * num_groups
    num_tied_G = tl.load(num_tied_ptr + group_G, mask=is_group_G, other=0)
    left_G = tl.maximum(num_left - (tl.cumsum(num_tied_G, axis=0) - num_tied_G), 0)
    sum_G = tl.load(sums_ptr + group_G, mask=is_group_G, other=0.0).to(tl.float64)
    sum_G += tl.minimum(num_tied_G, left_G).to(tl.float64) * weight_at_cut
    end_G = tl.cumsum(sum_G, axis=0)
    wanted = draw * tl.max(end_G, axis=0)
    # The group in which the sum exceeds the draw, or the last one with a token if rounding has hidden it.
    last = tl.max(tl.where(sum_G > 0, group_G, 0), axis=0)
    group = tl.minimum(tl.sum((end_G <= wanted).to(tl.int32), axis=0), last)
    before = tl.max(tl.where(group_G < group, end_G, 0.0), axis=0)
    num_left = tl.sum(tl.where(group_G == group, left_G, 0), axis=0)
    token_W = group * width + tl.arange(0, width)
    distance_W = _distances(_load(row_ptr, token_W, num_tokens), coldness, best, farthest)
    key_W = distance_W.to(tl.int32, bitcast=True)
    is_tied_W = (key_W == cut).to(tl.int32)
    is_kept_W = (key_W < cut) | ((is_tied_W > 0) & (tl.cumsum(is_tied_W, axis=0) <= num_left))
    up_to_W = before + tl.cumsum(tl.where(is_kept_W, tl.exp(-distance_W), 0.0).to(tl.float64), axis=0)
    found = tl.min(tl.where(is_kept_W & (up_to_W > wanted), token_W, num_tokens), axis=0)
    last_kept = tl.max(tl.where(is_kept_W, token_W, -1), axis=0)
    return tl.where(found < num_tokens, found, last_kept)


@jit()
def _draw_tokens_kernel(
    token_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    num_tokens: tl.tensor,
    table_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_counted: tl.tensor,
    edited_ptr: tl.tensor,
    edited_stride: tl.tensor,
    near_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    num_tied_ptr: tl.tensor,
    penalizes: tl.constexpr,
    num_fields: tl.constexpr,
    num_bounds: tl.constexpr,
    row_groups: tl.constexpr,
    num_groups: tl.constexpr,
    block_v: tl.constexpr,
) -> None:
    b = tl.program_id(0).to(tl.int64)
    fields_ptr = table_ptr + b * num_fields
    temperature = tl.load(fields_ptr).to(tl.float32)
    top_k = tl.load(fields_ptr + 1).to(tl.int32)
    top_p = tl.load(fields_ptr + 2).to(tl.float32)
    log_min_p = tl.load(fields_ptr + 3).to(tl.float32)
    draw = tl.load(fields_ptr + 4)
    last_token = tl.load(fields_ptr + 5).to(tl.int32)
    counts_row = tl.load(fields_ptr + 6).to(tl.int64)
    repetition = tl.load(fields_ptr + 7).to(tl.float32)
    presence = tl.load(fields_ptr + 8).to(tl.float32)
    frequency = tl.load(fields_ptr + 9).to(tl.float32)
    row_ptr = logits_ptr + b * stride
    near_ptr += b * MAX_NEAR
    sums_ptr += b * row_groups
    num_tied_ptr += b * row_groups
    best, token = _find_best(
        row_ptr,
        num_tokens,
        edited_ptr + b * edited_stride,
        counts_ptr + tl.maximum(counts_row, 0) * num_counted,
        tl.where(counts_row < 0, 0, num_counted),
        repetition,
        presence,
        frequency,
        penalizes,
        block_v,
    )
    if penalizes:
        row_ptr = edited_ptr + b * edited_stride
    coldness = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    farthest = tl.where(temperature > 0, -log_min_p, float("inf"))
    cut = num_tokens * 0 + LAST_KEY
    num_left = num_tokens * 1  # of the tokens at the cut
    if temperature > 0:
        if (top_k < num_tokens) | (top_p < 1):
            key_1, key_2, key_3, key_4 = cut * 0 + KEY_2, cut * 0 + KEY_6, cut * 0 + KEY_14, cut
            count_1, count_2, count_3, count_4, mass_1, mass_2, mass_3, mass_4 = _sum_up_to(
                row_ptr, num_tokens, coldness, best, farthest, key_1, key_2, key_3, key_4, block_v
            )
            num_up_to_cut, mass_up_to_cut, kept_mass = count_4, mass_4, mass_4
            for stage in range(2):
                by_mass = stage == 1
                target = tl.where(by_mass, top_p * kept_mass, top_k.to(tl.float32))
                if tl.where(by_mass, top_p < 1, top_k < num_up_to_cut):
                    low, low_count, low_mass, high, high_count, high_mass = _narrow_by_four(
                        cut * 0 - 1, cut * 0, kept_mass * 0, cut, num_up_to_cut, mass_up_to_cut,
                        key_1, key_2, key_3, key_4, count_1, count_2, count_3, count_4,
                        mass_1, mass_2, mass_3, mass_4, target, by_mass,
                    )  # fmt: skip
                    high, num_below, mass_below, num_up_to_cut, mass_up_to_cut = _find_cut(
                        near_ptr, row_ptr, num_tokens, coldness, best, farthest,
                        low, low_count, low_mass, high, high_count, high_mass, target, by_mass, block_v,
                    )  # fmt: skip
                    weight = tl.exp(-high.to(tl.float32, bitcast=True))
                    missing = tl.where(by_mass, tl.ceil((target - mass_below) / weight), target - num_below)
                    wanted = tl.maximum(tl.minimum(missing, num_tokens.to(tl.float32)), 1.0).to(tl.int32)
                    num_left = tl.where(high == cut, tl.minimum(wanted, num_left), wanted)
                    cut = high
                    kept_mass = tl.where(by_mass, kept_mass, mass_below + wanted.to(tl.float32) * weight)
        token = _draw_kept(
            sums_ptr, num_tied_ptr, row_ptr, num_tokens, coldness, best, farthest,
            cut, num_left, draw, row_groups, num_groups, block_v,
        )  # fmt: skip
        token = tl.where(token < 0, last_token, token)
    tl.store(token_ptr + b, tl.minimum(token, last_token).to(tl.int64))
    bounds_ptr += b * num_bounds
    tl.store(bounds_ptr, best)
    tl.store(bounds_ptr + 1, coldness)
    tl.store(bounds_ptr + 2, farthest)
    tl.store(bounds_ptr + 3, cut.to(tl.float32, bitcast=True))
    tl.store(bounds_ptr + 4, num_left.to(tl.float32))


def draw_tokens_triton(
    logits_BV: Tensor, table_BF: Tensor, counts_SV: Tensor, *, penalizes: bool
) -> tuple[Tensor, KeptBounds]:
    """Returns the tokens, int64 [B], see draw_tokens(), and which tokens they were drawn from. `penalizes` is whether a
    row has penalties."""
    num_rows, num_tokens = logits_BV.shape
    device = logits_BV.device
    assert logits_BV.stride(1) == 1 and table_BF.shape == (num_rows, NUM_FIELDS) and table_BF.is_contiguous()
    assert counts_SV.dtype == torch.int32 and counts_SV.is_contiguous()
    edited_BV = logits_BV  # in place, unless penalties would be rounded
    if penalizes and logits_BV.dtype != torch.float32:
        edited_BV = torch.empty(logits_BV.shape, dtype=torch.float32, device=device)
    row_groups = triton.next_power_of_2(triton.cdiv(num_tokens, BLOCK_V) * NUM_WARPS)
    token_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    bounds_BN = torch.empty((num_rows, NUM_BOUNDS), dtype=torch.float32, device=device)
    _draw_tokens_kernel[(num_rows,)](
        token_B,
        bounds_BN,
        logits_BV,
        logits_BV.stride(0),
        num_tokens,
        table_BF,
        counts_SV,
        counts_SV.shape[1],
        edited_BV,
        edited_BV.stride(0),
        torch.empty((num_rows, MAX_NEAR.value), dtype=torch.float32, device=device),
        torch.empty((num_rows, row_groups), dtype=torch.float32, device=device),
        torch.empty((num_rows, row_groups), dtype=torch.int32, device=device),
        penalizes=penalizes,
        num_fields=NUM_FIELDS,
        num_bounds=NUM_BOUNDS,
        row_groups=row_groups,
        num_groups=NUM_WARPS,
        block_v=BLOCK_V,
        num_warps=NUM_WARPS,
    )
    return token_B, KeptBounds(edited_BV, bounds_BN)
