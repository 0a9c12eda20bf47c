// The quantized experts of few tokens: gate and up with the activation, then down times the experts' weights.
// kernels/moe/few_tokens_codes_cuda.py compiles this file with NVRTC, behind four_bit_primitives.cuh and
// code_tiles.cuh of kernels/quant.
//
// Idea: an item is 16 outputs of one expert, for all tokens that chose it. The warps of a team share an item's inputs: a
// warp multiplies some blocks of 64 inputs, and the team adds the sums in shared memory. So results never depend on timing.
// Codes go from memory to registers, some blocks ahead, and become the tensor cores' first operand there: four bits by a
// table of pairs (four_bit.cu), e4m3 by moving its bits into a longer number, which is exact. Programs divide the items
// evenly, and each takes neighboring ones, whose x is then in its cache.
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
//   ROOM     bytes of shared memory for sums and the choice; with four bits they lie behind the table
//   INNER_TEAM, OUTER_TEAM  warps of a team, powers of two
//   INNER_DEPTH, OUTER_DEPTH  blocks of a warp that are in flight
#define THREADS (WARPS * 32)
#define ROWS 16       // outputs of an item; of gate and of up each
#define PITCH 20      // floats of a token's sums: lanes that write sums of 8 rows and 4 tokens meet no bank twice
#define COLUMNS 8     // the most tokens
#define MOST_PAIRS 1024
#define WORDS (BITS == 8 ? 2 : 1)  // loads of 16 bytes that are a lane's codes of 16 rows and 64 inputs

// The weights of one linear: those of all experts, one after the other, or those of the shared expert.
struct Matrix {
  const unsigned char* codes;
  const unsigned char* scales;
  const unsigned char* zeros;
  int inputs, blocks_a_group;  // blocks of 64 inputs that share a scale; 1 if SUB > 1
};

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

// Waits until the launch ahead has ended.
DEVICE void wait_for_launch_ahead() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_launch_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#ifdef __CUDA_ARCH__
// Waits for all threads of a team.
template <int TEAM> DEVICE void wait_team(int team) {
  if (TEAM == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" :: "r"(team), "n"(TEAM * 32) : "memory");
}
#endif

#if BITS == 4
// Fills the table of pairs. All loads of a thread are in flight together.
DEVICE void fill_pairs(const unsigned* pairs) {
  constexpr int COUNT = 256 * 8 / THREADS;
  unsigned pair[COUNT];
#pragma unroll
  for (int k = 0; k < COUNT; k++) pair[k] = pairs[(k * THREADS + (int)threadIdx.x) >> 3];
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const int i = k * THREADS + threadIdx.x;
    store_entries(i >> 3, i & 7, pair[k]);
  }
}

// Returns a pair of values minus their group's zero, a byte. The byte becomes the mantissa of 128 or of 1024, so all is exact.
DEVICE unsigned less_zero(unsigned pair, unsigned byte) {
  const unsigned number = byte * 0x10001u + (IS_HALF ? 0x64006400u : 0x43004300u);
  const unsigned zero = fma_pair(number, IS_HALF ? 0x3C003C00u : 0x3F803F80u, IS_HALF ? 0xE408E408u : 0xC308C308u);
  return fma_pair(zero, IS_HALF ? 0xBC00BC00u : 0xBF80BF80u, pair);
}
#else
// Returns the values of two neighboring e4m3 codes, of the lower or upper half of a word. Their bits, moved to the exponent
// and mantissa of a longer number, are 2^120 or 2^8 times too small. A code of NaN becomes 480.
DEVICE unsigned e4m3_pair(unsigned word, int upper) {
  const unsigned two = __byte_perm(word, 0, upper ? 0x3424 : 0x1404);  // in the upper byte of each half
  const unsigned small = (two & 0x80008000u) | (IS_HALF ? two >> 1 & 0x3F803F80u : two >> 4 & 0x07F007F0u);
  return fma_pair(small, IS_HALF ? 0x5C005C00u : 0x7B807B80u, 0x80008000u);
}
#endif

// A token, and as which of its experts it chose an item's. The token is -1 for a column of the product that is not used.
struct Column {
  int token, place;
};

// The experts of the tokens, in shared memory: those that each token chose, and the first pair of each expert.
struct Choice {
  int* experts;  // [T, K]
  int* firsts;   // pairs
  int* flags;    // of pairs: 1 for the first pair of an expert
  int count;     // of firsts

  // Reads the choice. All threads call it.
  DEVICE Choice(const FewTokens& p, int* memory) : experts(memory), firsts(memory + MOST_PAIRS), flags(memory + 2 * MOST_PAIRS) {
    const int pairs = p.tokens * p.per_token;
    for (int i = threadIdx.x; i < pairs; i += THREADS) experts[i] = p.experts[i];
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
      bool is_first = true;
      for (int j = 0; j < i; j++) is_first &= experts[j] != experts[i];
      flags[i] = is_first;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
      int before = 0;
      for (int j = 0; j < i; j++) before += flags[j];
      if (flags[i]) firsts[before] = i;
      if (i == pairs - 1) firsts[MOST_PAIRS - 1] = before + flags[i];
    }
    __syncthreads();
    count = firsts[MOST_PAIRS - 1];
  }

  DEVICE int expert(int first) const { return experts[firsts[first]]; }

  // Returns the token of column n. A token of NaN may have an expert several times.
  DEVICE Column column(const FewTokens& p, int expert, int n) const {
    Column found = {-1, 0};
    if (n < p.tokens)
      for (int k = 0; k < p.per_token; k++)
        if (experts[n * p.per_token + k] == expert) found = {n, k};
    return found;
  }
};

// 16 outputs of an expert for at most COLUMNS tokens. Its row of x, for the token of a lane, is -1 for an unused column.
struct Item {
  bool exists, is_shared;
  int group, expert, output, steps;  // group: one of the choice's, or 0 for the shared expert
  int row;

  DEVICE Item(const FewTokens& p, const Choice& experts, int index, int end, int member, int team, bool outer, int lane) {
    const int of_expert = p.outputs / ROWS, own = experts.count * of_expert;
    exists = index < end;
    is_shared = exists && index >= own;
    group = 0, expert = 0, output = 0, steps = 0, row = -1;
    if (!exists) return;
    if (is_shared) {
      output = (index - own) * ROWS;
    } else {
      group = index / of_expert;
      expert = experts.expert(group);
      output = index % of_expert * ROWS;
    }
    steps = ((is_shared ? p.shared.inputs : p.routed.inputs) / 64 - member + team - 1) / team;
    const Column of_lane = column(p, experts, lane >> 2);
    row = outer && !is_shared && of_lane.token >= 0 ? of_lane.place * p.tokens + of_lane.token : of_lane.token;
  }

  DEVICE Column column(const FewTokens& p, const Choice& experts, int n) const {
    if (!is_shared) return experts.column(p, expert, n);
    return {n < p.tokens ? n : -1, p.per_token};
  }
};

// The weights of 16 outputs and a block of 64 inputs, in registers; for gate and up those of both.
template <int PARTS> struct Weights {
  U4 code[PARTS][WORDS];
  float scale[PARTS][2][SUB];  // of rows g and g + 8
  unsigned zero[PARTS][2][SUB];

  DEVICE void load(const FewTokens& p, const Item& item, int block, int lane) {
    const int g = lane >> 2;
    const Matrix& m = item.is_shared ? p.shared : p.routed;
    const int outputs = item.is_shared ? p.shared_outputs : p.outputs;
    const int groups = m.inputs / 64 / m.blocks_a_group * SUB;  // of a row
    const int group = SUB > 1 ? block * SUB : block / m.blocks_a_group;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const size_t first = ((size_t)item.expert * PARTS + part) * outputs + item.output;  // the item's first row
#if BITS == 8
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const size_t row = first + g + h * 8;
        code[part][h] = load_once(m.codes + row * m.inputs + block * 64 + (lane & 3) * 16);
        scale[part][h][0] = ((const float*)m.scales)[row * groups + group];
      }
#else
      const size_t tile = first / 64, quarter = first / 16 % 4;
      code[part][0] = load_once(m.codes + (tile * (m.inputs / 64) + block) * 2048 + quarter * 512 + codes_of_lane(lane));
#pragma unroll
      for (int s = 0; s < SUB; s++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const size_t at = ((tile * groups + group + s) * 8 + g) * 8 + h * 4 + quarter;
          const unsigned short bits = SCALE == 0 ? 0 : ((const unsigned short*)m.scales)[at];
          scale[part][h][s] =
              SCALE == 0 ? ((const float*)m.scales)[at] : SCALE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
          if (ZEROS) zero[part][h][s] = m.zeros[at];
        }
#endif
    }
  }

  // Adds the products of a block to the sums.
  DEVICE void multiply(const FewTokens& p, const Item& item, int block, float (*sums)[4], int lane, unsigned table) const {
    U2 x[STEPS] = {};
    const int t = lane & 3, inputs = item.is_shared ? p.shared.inputs : p.routed.inputs;
    if (item.row >= 0) {
      const unsigned short* from = (item.is_shared ? p.shared_x : p.x) + (size_t)item.row * inputs + block * 64;
#pragma unroll
      for (int q = 0; q < STEPS; q++) {
        if (SUB == 4) {
          x[q] = load_8(from + q * 16 + t * 4);
        } else if (q % 2 == 0) {
          const U4 r = load_16(from + (BITS == 8 ? t * 16 + q * 4 : q / 2 * 32 + t * 8));
          x[q] = U2{{r.v[0], r.v[1]}};
          x[q + 1] = U2{{r.v[2], r.v[3]}};
        }
      }
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int s = 0; s < SUB; s++) {
        float c[4] = {};
#pragma unroll
        for (int q = s * (STEPS / SUB); q < (s + 1) * (STEPS / SUB); q++) {
          unsigned a[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
#if BITS == 8
            a[i] = e4m3_pair(code[part][i & 1].v[q], i >> 1);
#else
            a[i] = operand(code[part][0], q, i, table);
            if (ZEROS) a[i] = less_zero(a[i], zero[part][i & 1][s]);
#endif
          }
          mma(c, a, x[q]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[part][i] += scale[part][i >> 1][s] * c[i];
      }
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

template <bool OUTER, int TEAM, int DEPTH> DEVICE void compute(const FewTokens& p) {
  constexpr int PARTS = OUTER ? 1 : 2, TEAMS = WARPS / TEAM;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / TEAM, member = warp % TEAM;
  float* all_sums = (float*)(BITS == 4 ? behind_table() : all_shared());  // [warps, parts, tokens, PITCH]
  static_assert(WARPS * PARTS * COLUMNS * PITCH * 4 + 3 * MOST_PAIRS * 4 <= ROOM, "the sums and the choice must fit");
  unsigned lane_bits = 0;
#if BITS == 4
  fill_pairs(p.pairs);
#endif
  if (!OUTER) {
    wait_for_launch_ahead();
    let_next_launch_begin();
  }
  const Choice experts(p, (int*)(all_sums + WARPS * PARTS * COLUMNS * PITCH));  // its barriers are those of the table, too
#if BITS == 4
  lane_bits = lane_part(lane);
#endif
  const long long total = experts.count * (p.outputs / ROWS) + p.shared_outputs / ROWS;
  const int first = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  const auto item_at = [&](int index) { return Item(p, experts, index, end, member, TEAM, OUTER, lane); };
  int index = first + team, next_index = index, next_step = 0;
  Item item = item_at(index), next_item = item;
  Weights<PARTS> weights[DEPTH];
  // Finds the item whose weights are loaded next. A warp skips items of which it has no block.
  const auto advance = [&]() {
    while (next_item.exists && next_step >= next_item.steps) {
      next_index += TEAMS;
      next_item = item_at(next_index);
      next_step = 0;
    }
  };
  const auto load = [&](int i) {
    if (next_step + i < next_item.steps) weights[i].load(p, next_item, (next_step + i) * TEAM + member, lane);
  };
  advance();
#pragma unroll
  for (int i = 0; i < DEPTH; i++) load(i);
  if (OUTER) {
    wait_for_launch_ahead();
    let_next_launch_begin();
  }
#pragma unroll 1
  while (item.exists) {
    float sums[PARTS][4] = {};
#pragma unroll 1
    for (int step = 0; step < item.steps; step += DEPTH) {
      next_step += DEPTH;
      advance();
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        if (step + i < item.steps) weights[i].multiply(p, item, (step + i) * TEAM + member, sums, lane, lane_bits);
        load(i);
      }
    }
    const int g = lane >> 2, t = lane & 3;
    wait_team<TEAM>(team);  // the sums of the last item have been read
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        all_sums[((warp * PARTS + part) * COLUMNS + t * 2 + (i & 1)) * PITCH + g + (i >> 1) * 8] = sums[part][i];
    wait_team<TEAM>(team);
    for (int i = threadIdx.x % (TEAM * 32); i < p.tokens * ROWS; i += TEAM * 32) {
      const int n = i / ROWS, row = i % ROWS, output = item.output + row;
      const Column column = item.column(p, experts, n);
      if (column.token < 0) continue;
      float sum[PARTS] = {};
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int w = 0; w < TEAM; w++) sum[part] += all_sums[(((team * TEAM + w) * PARTS + part) * COLUMNS + n) * PITCH + row];
      const size_t pair = (size_t)column.place * p.tokens + column.token;
      if constexpr (OUTER) {
        const int summands = p.per_token + (p.shared_outputs > 0);
        p.sums[pair * p.outputs + output] = sum[0] * p.weights[column.token * summands + column.place];
      } else {
        const float value = activated(p, sum[0], sum[PARTS - 1]);
        const unsigned short number = IS_HALF ? to_half(value) : to_bfloat(value);
        if (item.is_shared)
          p.shared_inner[(size_t)column.token * p.shared_outputs + output] = number;
        else
          p.inner[pair * p.outputs + output] = number;
      }
    }
    index += TEAMS;
    item = item_at(index);
  }
}

#define PROGRAM KERNEL void __launch_bounds__(THREADS, 1)
PROGRAM inner(const FewTokens p) { compute<false, INNER_TEAM, INNER_DEPTH>(p); }
PROGRAM outer(const FewTokens p) { compute<true, OUTER_TEAM, OUTER_DEPTH>(p); }
