// x @ W.T for at most 8 tokens, with weights of codes. kernels/quant/few_tokens_cuda.py compiles this file with NVRTC, behind
// code_operands.cuh.
//
// Idea: with so few tokens, a product takes as long as the codes' bytes. An item is 16 outputs, which a team of warps
// computes as code_operands.cuh says. Programs divide the items evenly. A launch may begin before the one ahead has ended,
// and copies its first codes before it waits for x.
//
// The compiler is given IS_HALF, BITS, SCALE, SUB, ZEROS and WARPS, as code_operands.cuh says, and:
//   LINEAR_TEAM   warps of a team, a power of two
//   LINEAR_DEPTH  blocks of a warp that have room, the one that is multiplied and those in flight
//   ROOM   bytes of shared memory for blocks and sums; with four bits they lie behind the table

// Arguments of a launch; FewTokenLinearArguments in few_tokens_cuda.py is the same. T tokens, D in, O out.
struct FewTokenLinear {
  Matrix weight;
  const unsigned* pairs;       // [256] pairs of values, if BITS is 4
  const unsigned short* x;     // [T, D]
  const unsigned short* bias;  // [O] or null
  unsigned short* y;           // [T, O]
  int tokens, outputs;
};

KERNEL void __launch_bounds__(THREADS, 1) linear(const FewTokenLinear p) {
  constexpr int TEAMS = WARPS / LINEAR_TEAM;
  using Block = Operands<1>;
  static_assert(WARPS * (COLUMNS * PITCH * 4 + LINEAR_DEPTH * Block::BYTES) <= ROOM, "the shared memory must suffice");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / LINEAR_TEAM, member = warp % LINEAR_TEAM;
  unsigned char* memory = BITS == 4 ? behind_table() : all_shared();
  unsigned char* blocks = memory + warp * LINEAR_DEPTH * Block::BYTES;  // of this warp
  float* all_sums = (float*)(memory + WARPS * LINEAR_DEPTH * Block::BYTES);  // [warps, COLUMNS, PITCH]
  const int items = p.outputs / ROWS, inputs = p.weight.inputs, column = lane >> 2;
  const int first = (long long)items * blockIdx.x / gridDim.x, end = (long long)items * (blockIdx.x + 1) / gridDim.x;
  const Share share(inputs, member, LINEAR_TEAM, false);
  const unsigned short* x = column < p.tokens ? p.x + (size_t)column * inputs : nullptr;
  const auto source_of = [&](int item) { return Source<1>(p.weight, (size_t)item * ROWS, 0, x, lane); };
  int next_item = first + team, next_step = 0, next_slot = 0, slot = 0;
  Source<1> next_source = source_of(next_item);
  Block operands;
  const auto copy_next = [&](bool weights, bool x) {
    if (next_step == share.count) {
      next_item += TEAMS;
      next_source = source_of(next_item);
      next_step = 0;
    }
    if (next_item < end && share.count) {
      unsigned char* to = blocks + next_slot * Block::BYTES;
      const int block = share.block(next_step);
      if (weights) Block::copy_weights(to, next_source, block, begins_group(next_source, share, next_step), lane);
      if (x) Block::copy_x(to, next_source, p.x, block, lane);
      next_step++;
    }
    next_slot = next_slot + 1 == LINEAR_DEPTH ? 0 : next_slot + 1;
  };
  for (int i = 0; i < LINEAR_DEPTH - 1; i++) copy_next(true, false);
  unsigned lane_bits = 0;
#if BITS == 4
  fill_pairs(p.pairs);
  __syncthreads();
  lane_bits = lane_part(lane);
#endif
  wait_for_launch_ahead();
  let_next_launch_begin();
  next_item = first + team, next_step = next_slot = 0;
  next_source = source_of(next_item);
  for (int i = 0; i < LINEAR_DEPTH - 1; i++) {
    copy_next(false, true);
    close_copies();
  }
#pragma unroll 1
  for (int item = first + team; item < end; item += TEAMS) {
    const Source<1> source = source_of(item);
    float sums[1][4] = {};
#pragma unroll 1
    for (int step = 0; step < share.count; step++) {
      wait_copies<LINEAR_DEPTH - 2>();
      copy_next(true, true);
      close_copies();
      operands.multiply(blocks + slot * Block::BYTES, source, begins_group(source, share, step), sums, lane, lane_bits);
      slot = slot + 1 == LINEAR_DEPTH ? 0 : slot + 1;
    }
    wait_team<LINEAR_TEAM>(team);  // the sums of the last item have been read
    put_sums<1>(all_sums + warp * COLUMNS * PITCH, sums, lane);
    wait_team<LINEAR_TEAM>(team);
    for (int i = threadIdx.x % (LINEAR_TEAM * 32); i < p.tokens * ROWS; i += LINEAR_TEAM * 32) {
      const int token = i / ROWS, row = i % ROWS, output = item * ROWS + row;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < LINEAR_TEAM; w++) sum += all_sums[((team * LINEAR_TEAM + w) * COLUMNS + token) * PITCH + row];
      if (p.bias) sum += IS_HALF ? half_to_float(p.bias[output]) : bfloat_to_float(p.bias[output]);
      p.y[(size_t)token * p.outputs + output] = IS_HALF ? to_half(sum) : to_bfloat(sum);
    }
  }
}
