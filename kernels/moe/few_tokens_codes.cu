// The quantized experts of few tokens: gate and up with the activation, then down times the experts' weights.
// kernels/moe/few_tokens_codes_cuda.py compiles this file with NVRTC, behind kernels/quant/four_bit_primitives.cuh.
//
// Idea: an item is 16 outputs of one expert, for a group of at most 8 pairs of a token and that expert. The warps of a team
// share an item's inputs: a warp multiplies some blocks of 64 inputs, and the team adds the sums in shared memory. So
// results never depend on timing.
// Codes go from memory to registers, some blocks ahead, and become the tensor cores' first operand there: four bits by a
// table of pairs (four_bit.cu), e4m3 by moving its bits into a longer number, which is exact. x is loaded with the codes that
// it is multiplied by. A GPU returns the data of loads in order, so any later load would wait for codes of the blocks
// ahead. What an item needs beside them is in shared memory for the same reason. Programs divide the items evenly, and each
// takes neighboring ones, whose x is then in its cache.
// Up to 8 tokens, the first pair that has an expert stands for all others, and nothing is sorted. For more tokens, a group
// has the pairs of a tile (moe_tiles_triton.py).
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
//   ONE_INNER_TEAM, INNER_TEAM, OUTER_TEAM  warps of a team, powers of two: of gate and up for one token and for more, and
//            of down
//   INNER_DEPTH, OUTER_DEPTH  blocks of a warp that are in flight
#define THREADS (WARPS * 32)
#define STEPS 4       // products of 16 inputs in a block
#define ROWS 16       // outputs of an item; of gate and of up each
#define PITCH 20      // floats of a token's sums: lanes that write sums of 8 rows and 4 tokens meet no bank twice
#define COLUMNS 8     // the most pairs of a group
#define MOST_PAIRS 512      // without tiles
#define MOST_GROUPS 512     // of a program
#define MOST_WEIGHTS 2048
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
  const int* experts;              // [T, K], for at most COLUMNS tokens
  const int* used_tiles;           // [1] number of tiles that have pairs, for more tokens, as the next two
  const int* expert_of_tile;       // [used_tiles]
  const int* pair_of_tile;         // [used_tiles, COLUMNS], and -1 behind a tile's last pair
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
// and mantissa of a longer number, are 2^120 or 2^8 times too small. The sum moves the sign farther than the rest. A code of
// NaN becomes 480.
DEVICE unsigned e4m3_pair(unsigned word, int upper) {
  const unsigned two = __byte_perm(word, 0, upper ? 0x4342 : 0x4140);  // in the lower byte of each half
  const unsigned sign = two & 0x00800080u;
  const unsigned small = IS_HALF ? (two + sign) * 128u : two * 16u + sign * 240u;
  return fma_pair(small, IS_HALF ? 0x5C005C00u : 0x7B807B80u, 0x80008000u);
}
#endif

// The groups of pairs of which a program has items, in shared memory. A pair is a token's number times K, and as which of
// its experts the token chose the group's.
struct Groups {
  int* expert;    // [MOST_GROUPS]
  short* pair;    // [MOST_GROUPS, COLUMNS], -1 for a column of the product that is not used
  float* weight;  // [T, J], for down
  int first;      // the group that lies first
  int count;      // all groups of the launch
  static constexpr int BYTES = MOST_GROUPS * (4 + COLUMNS * 2) + MOST_WEIGHTS * 4;

  DEVICE Groups(int* memory) : expert(memory), pair((short*)(memory + MOST_GROUPS)), first(0), count(0) {
    weight = (float*)(pair + MOST_GROUPS * COLUMNS);
  }

  // Finds the experts that few tokens chose. All threads call it, before read_weights(), in whose memory it works.
  DEVICE void choose(const FewTokens& p) {
    const int pairs = p.tokens * p.per_token;
    int* scratch = (int*)weight;
    int *const chosen = scratch, *const is_first = scratch + MOST_PAIRS, *const found = scratch + 2 * MOST_PAIRS;
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
      int last = -1;  // a token of NaN may have an expert several times
      if (token < p.tokens)
#pragma unroll 8
        for (int k = token * p.per_token; k < (token + 1) * p.per_token; k++) last = chosen[k] == own ? k : last;
      pair[i] = last;
    }
    __syncthreads();
  }

  // Reads the tiles from `first` on. All threads call it.
  DEVICE void read_tiles(const FewTokens& p, int end) {
    for (int i = threadIdx.x; i < (end - first) * COLUMNS; i += THREADS) {
      if (i % COLUMNS == 0) expert[i / COLUMNS] = p.expert_of_tile[first + i / COLUMNS];
      pair[i] = p.pair_of_tile[first * COLUMNS + i];
    }
  }

  DEVICE void read_weights(const FewTokens& p) {
    const int count = p.tokens * (p.per_token + (p.shared_outputs > 0));
    for (int i = threadIdx.x; i < count; i += THREADS) weight[i] = p.weights[i];
  }
};

// A token, and as which of its experts it chose an item's. The token is -1 for a column of the product that is not used.
struct Column {
  int token, place;
};

// 16 outputs of an expert for a group of pairs. Its row of x, for the column of a lane, is -1 for an unused column.
struct Item {
  bool exists, is_shared;
  int group, expert, output, steps;  // group: one of Groups, or some tokens for the shared expert
  int row;

  DEVICE Item(const FewTokens& p, const Groups& groups, int index, int end, int member, int team, bool outer, int lane) {
    const int of_expert = p.outputs / ROWS, own = groups.count * of_expert;
    exists = index < end;
    is_shared = exists && index >= own;
    group = 0, expert = 0, output = 0, steps = 0, row = -1;
    if (!exists) return;
    if (is_shared) {
      const int of_shared = p.shared_outputs / ROWS;
      group = (index - own) / of_shared;
      output = (index - own) % of_shared * ROWS;
    } else {
      group = index / of_expert;
      output = index % of_expert * ROWS;
      expert = groups.expert[group - groups.first];
    }
    steps = ((is_shared ? p.shared.inputs : p.routed.inputs) / 64 - member + team - 1) / team;
    const Column of_lane = column(p, groups, lane >> 2);
    row = outer && !is_shared && of_lane.token >= 0 ? of_lane.place * p.tokens + of_lane.token : of_lane.token;
  }

  DEVICE Column column(const FewTokens& p, const Groups& groups, int n) const {
    if (is_shared) return {group * COLUMNS + n < p.tokens ? group * COLUMNS + n : -1, p.per_token};
    const int pair = groups.pair[(group - groups.first) * COLUMNS + n];
    return {pair < 0 ? -1 : pair / p.per_token, pair < 0 ? 0 : pair % p.per_token};
  }
};

// The weights of 16 outputs and a block of 64 inputs, for gate and up those of both, and x, in registers.
template <int PARTS> struct Operands {
  U4 code[PARTS][WORDS];
  float scale[PARTS][2][SUB];  // of rows g and g + 8
  unsigned zero[PARTS][2][SUB];
  U2 x[STEPS];

  DEVICE void load_weights(const FewTokens& p, const Item& item, int block, int lane) {
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
      code[part][0] = load_once(m.codes + (tile * (m.inputs / 64) + block) * 2048 + quarter * 512 + lane * 16);
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

  DEVICE void load_x(const FewTokens& p, const Item& item, int block, int lane) {
#pragma unroll
    for (int q = 0; q < STEPS; q++) x[q] = U2{{0, 0}};
    if (item.row < 0) return;
    const int t = lane & 3, inputs = item.is_shared ? p.shared.inputs : p.routed.inputs;
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

  // Adds the products of a block to the sums.
  DEVICE void multiply(float (*sums)[4], unsigned table) const {
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
            a[i] = lookup(code[part][0].v[q], i, table);
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

template <bool OUTER, bool TILED, int TEAM, int DEPTH> DEVICE void compute(const FewTokens& p) {
  constexpr int PARTS = OUTER ? 1 : 2, TEAMS = WARPS / TEAM, SUMS = WARPS * PARTS * COLUMNS * PITCH;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / TEAM, member = warp % TEAM;
  float* all_sums = (float*)(BITS == 4 ? behind_table() : all_shared());  // [warps, parts, COLUMNS, PITCH]
  static_assert(SUMS * 4 + Groups::BYTES <= ROOM && MOST_WEIGHTS > 2 * MOST_PAIRS, "the sums and the choice must fit");
  unsigned lane_bits = 0;
#if BITS == 4
  fill_pairs(p.pairs);
#endif
  if (!OUTER) {
    wait_for_launch_ahead();
    let_next_launch_begin();
  }
  Groups groups((int*)(all_sums + SUMS));
  if (TILED)
    groups.count = *p.used_tiles;
  else
    groups.choose(p);
  const int of_expert = p.outputs / ROWS, of_shared = p.shared_outputs / ROWS * ((p.tokens + COLUMNS - 1) / COLUMNS);
  const long long total = groups.count * of_expert + of_shared;
  const int first = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  if (TILED) {
    groups.first = first / of_expert;
    groups.read_tiles(p, min(groups.count, (end + of_expert - 1) / of_expert));
  }
  if (OUTER) groups.read_weights(p);
  __syncthreads();  // for the table, too
#if BITS == 4
  lane_bits = lane_part(lane);
#endif
  const auto item_at = [&](int index) { return Item(p, groups, index, end, member, TEAM, OUTER, lane); };
  int index = first + team, next_index = index, next_step = 0;
  Item item = item_at(index), next_item = item;
  Operands<PARTS> operands[DEPTH];
  // Finds the item whose operands are loaded next. A warp skips items of which it has no block.
  const auto advance = [&]() {
    while (next_item.exists && next_step >= next_item.steps) {
      next_index += TEAMS;
      next_item = item_at(next_index);
      next_step = 0;
    }
  };
  const auto load_weights = [&](int i) {
    if (next_step + i < next_item.steps) operands[i].load_weights(p, next_item, (next_step + i) * TEAM + member, lane);
  };
  const auto load_x = [&](int i) {
    if (next_step + i < next_item.steps) operands[i].load_x(p, next_item, (next_step + i) * TEAM + member, lane);
  };
  advance();
#pragma unroll
  for (int i = 0; i < DEPTH; i++) load_weights(i);
  if (OUTER) {
    wait_for_launch_ahead();
    let_next_launch_begin();
  }
#pragma unroll
  for (int i = 0; i < DEPTH; i++) load_x(i);
#pragma unroll 1
  while (item.exists) {
    float sums[PARTS][4] = {};
#pragma unroll 1
    for (int step = 0; step < item.steps; step += DEPTH) {
      next_step += DEPTH;
      advance();
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        if (step + i < item.steps) operands[i].multiply(sums, lane_bits);
        load_weights(i);
        load_x(i);
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
    for (int i = threadIdx.x % (TEAM * 32); i < COLUMNS * ROWS; i += TEAM * 32) {
      const int n = i / ROWS, row = i % ROWS, output = item.output + row;
      const Column column = item.column(p, groups, n);
      if (column.token < 0) continue;
      float sum[PARTS] = {};
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int w = 0; w < TEAM; w++) sum[part] += all_sums[(((team * TEAM + w) * PARTS + part) * COLUMNS + n) * PITCH + row];
      const size_t pair = (size_t)column.place * p.tokens + column.token;
      if constexpr (OUTER) {
        const int summands = p.per_token + (p.shared_outputs > 0);
        p.sums[pair * p.outputs + output] = sum[0] * groups.weight[column.token * summands + column.place];
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
PROGRAM inner_one(const FewTokens p) { compute<false, false, ONE_INNER_TEAM, INNER_DEPTH>(p); }
PROGRAM inner_few(const FewTokens p) { compute<false, false, INNER_TEAM, INNER_DEPTH>(p); }
PROGRAM inner_tiles(const FewTokens p) { compute<false, true, INNER_TEAM, INNER_DEPTH>(p); }
PROGRAM outer_few(const FewTokens p) { compute<true, false, OUTER_TEAM, OUTER_DEPTH>(p); }
PROGRAM outer_tiles(const FewTokens p) { compute<true, true, OUTER_TEAM, OUTER_DEPTH>(p); }
