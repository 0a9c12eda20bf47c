// The quantized experts of few tokens: gate and up with the activation, then down times the experts' weights.
// kernels/moe/few_tokens_codes_cuda.py compiles this file with NVRTC, behind kernels/quant/code_operands.cuh.
//
// Idea: an item is 16 outputs of gate and up each, or 32 of down, of one expert for all tokens that chose it, which are 8 at
// most. code_operands.cuh says how a team of warps computes it. What an item needs beside codes and x is in shared memory. Programs
// divide the items evenly, and each takes neighboring ones, whose x is then in its cache.
// The first pair of a token and an expert stands for all pairs of that expert, and nothing is sorted.
//
// A launch may begin before the one ahead has ended. The choice of experts is complete when gate and up lets the next
// launch begin, so down reads the choice and its first codes before it waits.
//
// The compiler is given:
//   IS_HALF  1 if x is float16, 0 if it is bfloat16
//   BITS     8: codes are e4m3 in rows, scales float32 [rows, groups]. 4: codes and scales lie as code_tiles.py says
//   SCALE, SUB, ZEROS  as for four_bit.cu
//   FORMULA  0 silu, 1 gelu_tanh, 2 clamped_swiglu
//   WARPS    warps of a program, a power of two
//   ROOM     bytes of shared memory for blocks in flight, sums and the choice; with four bits they lie behind the table
//   ONE_INNER_TEAM, INNER_TEAM, ONE_OUTER_TEAM, OUTER_TEAM  warps of a team, powers of two: of gate and up for one token and
//            for more, and of down for the same
//   MOST_DEPTH  the most blocks of a warp that have room, the one that is multiplied and those in flight
#define MOST_PAIRS 256
#define MOST_WEIGHTS (MOST_PAIRS + COLUMNS)
#define PARTS 2  // of ROWS rows in an item

// Arguments of a launch; FewTokenArguments in few_tokens_codes_cuda.py is the same. T tokens, K experts a token, D hidden
// size, I intermediate size, J = K, or K + 1 with a shared expert.
struct FewTokens {
  Matrix routed, shared;
  const unsigned* pairs;           // [256] pairs of values, if BITS is 4
  const unsigned short* x;         // gate and up: [T, D]; down: [K, T, I]
  const unsigned short* shared_x;  // gate and up: [T, D]; down: [T, I of the shared expert]
  const int* experts;              // [T, K]
  const float* weights;            // [T, J], for down
  unsigned short* inner;           // [K, T, I], of gate and up
  unsigned short* shared_inner;    // [T, I of the shared expert], of gate and up
  float* sums;                     // [J, T, D], of down
  int tokens, per_token;
  int outputs, shared_outputs;     // gate and up: I of an expert, and of the shared one or 0; down: D, and D or 0
  float alpha, limit;              // of clamped_swiglu
};

// A token, and as which of its experts it chose a group's. The token is -1 for a column of the product that is not used.
struct Column {
  int token, place;
};

// The experts that the tokens chose, in shared memory. A group is the tokens that chose the same one.
struct Groups {
  int* expert;    // [MOST_PAIRS]
  int* columns;   // [MOST_PAIRS, COLUMNS]: a column's token * 256 + place, or -1 if it is not used
  float* weight;  // [T, J], for down
  int count;
  static constexpr int BYTES = (MOST_PAIRS * (3 + COLUMNS) + 1 + MOST_WEIGHTS) * 4;

  DEVICE Column column(int group, int n) const {
    const int found = columns[group * COLUMNS + n];
    return {found >> 8, found & 255};
  }

  // Reads the choice. All threads call it, and wait for each other behind it.
  DEVICE Groups(const FewTokens& p, int* memory) : expert(memory), columns(memory + MOST_PAIRS) {
    const int pairs = p.tokens * p.per_token;
    int *const chosen = columns + MOST_PAIRS * COLUMNS, *const is_first = chosen + MOST_PAIRS;
    int* const found = is_first + MOST_PAIRS;
    weight = (float*)(found + 1);
    for (int i = threadIdx.x; i < pairs; i += THREADS) chosen[i] = p.experts[i];
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
      const int own = chosen[i];
      bool repeats = false;
#pragma unroll 8
      for (int j = 0; j < i; j++) repeats |= chosen[j] == own;
      is_first[i] = !repeats;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
      int before = 0;
#pragma unroll 8
      for (int j = 0; j < i; j++) before += is_first[j];
      if (is_first[i]) expert[before] = chosen[i];
      if (i == pairs - 1) *found = before + is_first[i];
    }
    __syncthreads();
    count = *found;
    for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS) {
      const int own = expert[i / COLUMNS], token = i % COLUMNS;
      int found = -1;  // a token of NaN may have an expert several times
      if (token < p.tokens)
#pragma unroll 8
        for (int k = 0; k < p.per_token; k++) found = chosen[token * p.per_token + k] == own ? token * 256 + k : found;
      columns[i] = found;
    }
  }

  DEVICE void read_weights(const FewTokens& p) const {
    const int count = p.tokens * (p.per_token + (p.shared_outputs > 0));
    for (int i = threadIdx.x; i < count; i += THREADS) weight[i] = p.weights[i];
  }
};

// Some outputs of an expert for a group, in parts of ROWS rows of its matrix. The group of the shared expert is behind the
// others, and has all tokens.
template <bool OUTER, int TEAM> struct Item {
  static constexpr int OUTPUTS = OUTER ? PARTS * ROWS : ROWS;  // of gate and up each
  const FewTokens& p;
  const Groups& groups;
  int left;       // items of the program from this one on
  int group, at;  // which item of the group it is
  bool is_shared;
  int row;  // of x, for the lane's column, or -1 if it is not used

  DEVICE Item(const FewTokens& p, const Groups& groups, int index, int end)
      : p(p), groups(groups), left(end - index), group(0), at(index), is_shared(false), row(-1) {
    const int of_expert = p.outputs / OUTPUTS, skipped = min(index / of_expert, groups.count);
    group = skipped;
    at -= skipped * of_expert;
    settle();
  }
  DEVICE bool exists() const { return left > 0; }
  DEVICE int of_group() const { return (is_shared ? p.shared_outputs : p.outputs) / OUTPUTS; }
  DEVICE const Matrix& matrix() const { return is_shared ? p.shared : p.routed; }
  // For one token, in which no other order was measured in a whole step, a warp's blocks are always neighbors.
  DEVICE Share share() const {
    return Share(matrix().inputs, (threadIdx.x >> 5) % TEAM, TEAM, BITS == 8 && p.tokens > 1);
  }
  DEVICE int output() const { return at * OUTPUTS; }
  DEVICE Column column(int n) const {
    if (!is_shared) return groups.column(group, n);
    return {n < p.tokens ? n : -1, p.per_token};
  }
  DEVICE void move(int count) {
    left -= count;
    at += count;
    settle();
  }
  // Finds the group, which is not far, and what depends on it.
  DEVICE void settle() {
    if (left <= 0) return;
    is_shared = group >= groups.count;
    while (at >= of_group()) {
      at -= of_group();
      is_shared = ++group >= groups.count;
    }
    const Column of_lane = column((threadIdx.x & 31) >> 2);
    row = OUTER && !is_shared && of_lane.token >= 0 ? of_lane.place * p.tokens + of_lane.token : of_lane.token;
  }
  DEVICE Source<PARTS> source() const {
    const Matrix& m = matrix();
    const int outputs = is_shared ? p.shared_outputs : p.outputs, expert = is_shared ? 0 : groups.expert[group];
    const unsigned short* x = (is_shared ? p.shared_x : p.x) + (size_t)row * m.inputs;
    const size_t first = (size_t)expert * (OUTER ? outputs : 2 * outputs) + output();
    return Source<PARTS>(m, first, OUTER ? ROWS : outputs, row < 0 ? nullptr : x, threadIdx.x & 31);
  }
};

DEVICE float sigmoid(float z) { return 1.f / (1.f + expf(-z)); }

DEVICE float activated(const FewTokens& p, float gate, float up) {
  if (FORMULA == 1) return gate * sigmoid(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)) * up;
  if (FORMULA == 2) {
    gate = fminf(gate, p.limit);
    return (fminf(fmaxf(up, -p.limit), p.limit) + 1.f) * gate * sigmoid(p.alpha * gate);
  }
  return gate * sigmoid(gate) * up;
}

template <bool OUTER, int TEAM> DEVICE void compute(const FewTokens& p) {
  using Block = Operands<PARTS>;
  constexpr int TEAMS = WARPS / TEAM, SUMS_OF_WARP = PARTS * COLUMNS * PITCH, SUMS = WARPS * SUMS_OF_WARP;
  constexpr int OUTPUTS = Item<OUTER, TEAM>::OUTPUTS;
  constexpr int FIT = (ROOM - SUMS * 4 - Groups::BYTES) / (WARPS * Block::BYTES), DEPTH = FIT < MOST_DEPTH ? FIT : MOST_DEPTH;
  static_assert(DEPTH >= 2, "the shared memory must suffice");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / TEAM;
  unsigned char* memory = BITS == 4 ? behind_table() : all_shared();
  unsigned char* blocks = memory + warp * DEPTH * Block::BYTES;  // of this warp
  float* all_sums = (float*)(memory + WARPS * DEPTH * Block::BYTES);  // [warps, PARTS, COLUMNS, PITCH]
  unsigned lane_bits = 0;
#if BITS == 4
  fill_pairs(p.pairs);
#endif
  if (!OUTER) {
    wait_for_launch_ahead();
    let_next_launch_begin();
  }
  const Groups groups(p, (int*)(all_sums + SUMS));
  const long long total = groups.count * (p.outputs / OUTPUTS) + p.shared_outputs / OUTPUTS;
  const int first = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  if (OUTER) groups.read_weights(p);
  __syncthreads();  // for the table, too
#if BITS == 4
  lane_bits = lane_part(lane);
#endif
  Item<OUTER, TEAM> item(p, groups, first + team, end), next_item = item;
  int next_step = 0, next_slot = 0, slot = 0;
  if (!item.exists()) {
    if (OUTER) wait_for_launch_ahead(), let_next_launch_begin();
    return;
  }
  Source<PARTS> source = item.source(), next_source = source;
  Share share = item.share(), next_share = share;
  Block operands;
  // Copies the next block of this warp, and finds the one behind it. A warp skips items of which it has no block.
  const auto copy_next = [&](bool weights, bool x) {
    while (next_item.exists() && next_step >= next_share.count) {
      next_item.move(TEAMS);
      if (next_item.exists()) next_source = next_item.source(), next_share = next_item.share();
      next_step = 0;
    }
    if (next_item.exists()) {
      unsigned char* to = blocks + next_slot * Block::BYTES;
      const int block = next_share.block(next_step);
      if (weights) Block::copy_weights(to, next_source, block, begins_group(next_source, next_share, next_step), lane);
      if (x) Block::copy_x(to, next_source, p.x, block, lane);
      next_step++;
    }
    next_slot = next_slot + 1 == DEPTH ? 0 : next_slot + 1;
  };
  if (OUTER) {
    for (int i = 0; i < DEPTH - 1; i++) copy_next(true, false);
    wait_for_launch_ahead();
    let_next_launch_begin();
    next_item.left = item.left, next_item.group = item.group, next_item.at = item.at;
    next_item.settle();
    next_source = source, next_share = share, next_step = next_slot = 0;
  }
  for (int i = 0; i < DEPTH - 1; i++) {
    copy_next(!OUTER, true);
    close_copies();
  }
#pragma unroll 1
  while (item.exists()) {
    float sums[PARTS][4] = {};
#pragma unroll 1
    for (int step = 0; step < share.count; step++) {
      wait_copies<DEPTH - 2>();
      copy_next(true, true);
      close_copies();
      const bool begins = begins_group(source, share, step);
      operands.multiply(blocks + slot * Block::BYTES, source, begins, sums, lane, lane_bits);
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    wait_team<TEAM>(team);  // the sums of the last item have been read
    put_sums<PARTS>(all_sums + warp * SUMS_OF_WARP, sums, lane);
    wait_team<TEAM>(team);
    const float* of_team = all_sums + team * TEAM * SUMS_OF_WARP;
    for (int i = threadIdx.x % (TEAM * 32); i < COLUMNS * OUTPUTS; i += TEAM * 32) {
      const int n = i / OUTPUTS, row = i % OUTPUTS, output = item.output() + row;
      const Column column = item.column(n);
      if (column.token < 0) continue;
      const auto sum_of = [&](int part) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < TEAM; w++) sum += of_team[w * SUMS_OF_WARP + (part * COLUMNS + n) * PITCH + row % ROWS];
        return sum;
      };
      const size_t pair = (size_t)column.place * p.tokens + column.token;
      if constexpr (OUTER) {
        const int summands = p.per_token + (p.shared_outputs > 0);
        p.sums[pair * p.outputs + output] = sum_of(row / ROWS) * groups.weight[column.token * summands + column.place];
      } else {
        const float value = activated(p, sum_of(0), sum_of(1));
        const unsigned short number = IS_HALF ? to_half(value) : to_bfloat(value);
        if (item.is_shared)
          p.shared_inner[(size_t)column.token * p.shared_outputs + output] = number;
        else
          p.inner[pair * p.outputs + output] = number;
      }
    }
    item.move(TEAMS);
    if (item.exists()) source = item.source(), share = item.share();
  }
}

#define PROGRAM KERNEL void __launch_bounds__(THREADS, 1)
PROGRAM inner_one(const FewTokens p) { compute<false, ONE_INNER_TEAM>(p); }
PROGRAM inner(const FewTokens p) { compute<false, INNER_TEAM>(p); }
PROGRAM outer_one(const FewTokens p) { compute<true, ONE_OUTER_TEAM>(p); }
PROGRAM outer(const FewTokens p) { compute<true, OUTER_TEAM>(p); }
