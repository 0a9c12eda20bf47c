// x @ W.T with weights of four bits, for 17 tokens and more, on GPUs of compute capability 9.0. It follows four_bit.cu, whose
// packing, table of pairs, runs and parts it shares.
//
// Idea: a warpgroup looks its rows' codes up once and multiplies them by up to 128 tokens with wgmma, whose first operand
// lies in registers and whose second, x, in shared memory. Warps of a producer load x, give its inputs the order of the codes'
// products and write it to shared memory, several blocks of 64 inputs ahead. So the warpgroups that multiply never wait
// for each other. Each has two independent units of 64 rows by N tokens: while one is multiplied, the other's sums are
// scaled or its codes looked up. Codes go from memory to registers, and the producer fetches them into the L2 cache some
// blocks ahead, since registers hold too few bytes in flight.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MULTIPLIERS 2        // warpgroups that multiply; one more produces
#define WIDE_THREADS ((MULTIPLIERS + 1) * 128)

// Describes B [16, N] in shared memory: two rows of core matrices, `core` bytes apart, whose matrices are 128 bytes apart.
DEVICE unsigned long long matrix(unsigned at, int core) {
  return (unsigned long long)(at >> 4) | (unsigned long long)(core >> 4) << 16 | (unsigned long long)(128 >> 4) << 32;
}

// A unit is 64 rows and N tokens. A warpgroup has TILES tiles of 64 rows and SPANS spans of N tokens.
// SUMS units are multiplied at a time.
template <int N, int TILES, int SPANS, int SUMS> struct Wide {
  static constexpr int TOKENS = N * SPANS, ROWS = MULTIPLIERS * TILES * 64, UNITS = TILES * SPANS;
  static constexpr int STAGE = TOKENS * 128, FITTING = STAGE_BYTES / STAGE, STAGES = FITTING < 6 ? FITTING : 6;
  static constexpr int CORE = TOKENS * 16;  // bytes of 8 inputs of all tokens
  static constexpr int GROUP_STEPS = STEPS / SUB;
  static constexpr int PRODUCER_REGISTERS = UNITS > 2 ? 56 : 88, MULTIPLIER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;
  const Linear& p;
  const int spans;  // of TOKENS tokens
  const Run run;
  const Groups groups;
  const int lane, g, t, warp;  // warp: of its warpgroup

  DEVICE Wide(const Linear& p)
      : p(p), spans((p.tokens + TOKENS - 1) / TOKENS), run(p, (p.outputs + ROWS - 1) / ROWS * spans), groups(p),
        lane(threadIdx.x & 31), g(lane >> 2), t(lane & 3), warp(threadIdx.x >> 5 & 3) {}

  DEVICE Barrier* filled() const { return (Barrier*)below_table(); }  // one of each stage
  DEVICE Barrier* used() const { return filled() + STAGES; }
  DEVICE int* is_last() const { return (int*)(used() + STAGES); }

  // Returns a tile of 64 rows of an item. Tiles behind the last one are computed as the last one, and not stored.
  DEVICE int tile_of(int item, int index) const { return item / spans * (ROWS / 64) + index; }
  DEVICE int held_tile_of(int item, int index) const { return min(tile_of(item, index), p.outputs / 64 - 1); }

  // The producer's part of x: 8 tokens by 32 inputs for a warp at a time, and a part of PIECES of them in registers.
  static constexpr int PARTS = UNITS > 2 ? TOKENS / 64 : 1, PIECES = TOKENS / 16 / PARTS;
  DEVICE void load(U4* x, const Place& place, int part) const {
    if (place.at >= run.end) return;
    const int first = place.item % spans * TOKENS;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int piece = (part * PIECES + i) * 4 + warp, token = first + (piece >> 1) * 8 + g;
      x[i] = U4{{0, 0, 0, 0}};
      if (token < p.tokens) x[i] = load_16(p.x + (size_t)token * p.inputs + place.block * 64 + (piece & 1) * 32 + t * 8);
    }
  }

  // Writes what was loaded. Core matrices of wgmma are 8 tokens by 8 inputs, of which a token's are 16 bytes.
  DEVICE void store(const U4* x, int stage, int part) const {
    unsigned char* at = above_table() + stage * STAGE;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int piece = (part * PIECES + i) * 4 + warp, half = piece & 1;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int core = SUB == 4 ? half * 4 + (t >> 1) * 2 + (k & 1) : half * 4 + k;
        const int word = SUB == 4 ? (t & 1) * 2 + (k >> 1) : t;
        *(unsigned*)(at + core * CORE + (piece >> 1) * 128 + g * 16 + word * 4) = x[i].v[k];
      }
    }
  }

  DEVICE void fetch_block(const Place& place) const {
    const int index = threadIdx.x - MULTIPLIERS * 128;
    if (index >= ROWS / 64 || place.at >= run.end) return;
    fetch(p, held_tile_of(place.item, index) * run.blocks + place.block);
  }
  DEVICE void fetch(const Linear& p, int block) const {
    const size_t group = (size_t)groups.first_of(block) * 64;
    fetch_into_cache(p.codes + (size_t)block * BLOCK_BYTES, BLOCK_BYTES);
    fetch_into_cache(p.scales + group * SCALE_BYTES, 64 * SUB * SCALE_BYTES);
    if (ZEROS) fetch_into_cache(p.zeros + group, 64 * SUB);
  }

  DEVICE void produce(Place place, U4* first) const {
    U4 second[PIECES];
    Place far = place;
    for (int i = 0; i < p.ahead; i++) far.move(1, run.blocks);
    int stage = 0, phase = 1;
#pragma unroll 1
    while (place.at < run.end) {
      if (PARTS == 1) place.move(1, run.blocks);
      load(second, place, PARTS - 1);
      wait_barrier(used() + stage, phase);
      store(first, stage, 0);
      if (PARTS == 1) {
        hand_over(stage, phase, far);
        if (place.at >= run.end) break;
        wait_barrier(used() + stage, phase);
      }
      place.move(1, run.blocks);
      load(first, place, 0);
      store(second, stage, PARTS - 1);
      hand_over(stage, phase, far);
    }
  }

  DEVICE void hand_over(int& stage, int& phase, Place& far) const {
    show_to_wgmma();
    arrive(filled() + stage);
    if (p.ahead) {
      fetch_block(far);
      far.move(1, run.blocks);
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }

  // A warpgroup's codes and numbers of a block of 64 inputs.
  struct Operands {
    U4 code[TILES];
    float scale[TILES][SUB][2];  // rows g and g + 8 of the warp's 16
    unsigned zero[TILES][SUB][2];
  };

  DEVICE void load(Operands& to, const Place& place) const {
    if (place.at >= run.end) return;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      const int block = held_tile_of(place.item, (threadIdx.x >> 7) * TILES + m) * run.blocks + place.block;
      to.code[m] = load_once(p.codes + (size_t)block * BLOCK_BYTES + warp * 512 + lane * 16);
      const size_t group = (size_t)groups.first_of(block) * 64 + g * 8 + warp;
#pragma unroll
      for (int s = 0; s < SUB; s++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const size_t at = group + s * 64 + h * 4;
          to.scale[m][s][h] = load_scale(p.scales, at);
          if (ZEROS) to.zero[m][s][h] = p.zeros[at];
        }
    }
  }

  static DEVICE float load_scale(const unsigned char* scales, size_t at) {
    if (SCALE == 0) return ((const float*)scales)[at];
    const unsigned short bits = ((const unsigned short*)scales)[at];
    return SCALE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
  }

  DEVICE void decode(unsigned (*a)[4], const Operands& from, int m, int s, unsigned lane_bits) const {
    unsigned zero[2];
#pragma unroll
    for (int h = 0; h < 2; h++) zero[h] = ZEROS ? zero_pair(from.zero[m][s][h], 0) : 0;
#pragma unroll
    for (int q = 0; q < GROUP_STEPS; q++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[q][i] = lookup(from.code[m].v[s * GROUP_STEPS + q], i, lane_bits);
        if (ZEROS) a[q][i] = minus_zero(a[q][i], zero[i & 1]);
      }
  }

  // Adds the products of a block to the sums.
  DEVICE void multiply(float (*sums)[N / 8][4], const Operands& from, int stage, unsigned lane_bits) const {
    const unsigned x = ABOVE_TABLE + stage * STAGE;
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      float c[SUMS][N / 8][4];
      unsigned a[TILES][GROUP_STEPS][4];
      decode(a[0], from, 0, s, lane_bits);
#pragma unroll
      for (int u = 0; u < UNITS + SUMS - 1; u++) {
        if (u < UNITS) {
          const int m = u / SPANS, span = u % SPANS;
          begin_wgmma();
#pragma unroll
          for (int q = 0; q < GROUP_STEPS; q++)
            Wgmma<N>::run(c[u % SUMS], a[m][q], matrix(x + (s * GROUP_STEPS + q) * 2 * CORE + span * N * 16, CORE), q > 0);
          close_wgmma();
          if (span == 0 && m + 1 < TILES) decode(a[m + 1], from, m + 1, s, lane_bits);
        }
        const int done = u - (SUMS - 1);
        if (done < 0) continue;
        if (u < UNITS) wait_wgmma<SUMS - 1>(c[done % SUMS]); else wait_wgmma<0>(c[done % SUMS]);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) sums[done][n][i] += from.scale[done / SPANS][s][i >> 1] * c[done % SUMS][n][i];
      }
    }
  }

  DEVICE int first_token(int item, int u, int n) const { return item % spans * TOKENS + u % SPANS * N + n * 8; }

  // The sums of a program's part lie by thread. All programs have the same threads for the same sums.
  DEVICE F4* part(int program, int index) const { return (F4*)(p.parts + (size_t)(program * 2 + index) * TOKENS * ROWS); }

  DEVICE void store_part(int item, float (*sums)[N / 8][4]) const {
    F4* to = part(blockIdx.x, run.part_of(blockIdx.x, item));
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int n = 0; n < N / 8; n++)
        if (first_token(item, u, n) < p.tokens)
          to[(u * (N / 8) + n) * MULTIPLIERS * 128 + threadIdx.x] = F4{{sums[u][n][0], sums[u][n][1], sums[u][n][2], sums[u][n][3]}};
  }

  DEVICE void add_part(int item, float (*sums)[N / 8][4], const F4* from) const {
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int n = 0; n < N / 8; n++)
        if (first_token(item, u, n) < p.tokens) {
          const F4 r = load_shared_by_programs(from + (u * (N / 8) + n) * MULTIPLIERS * 128 + threadIdx.x);
#pragma unroll
          for (int i = 0; i < 4; i++) sums[u][n][i] += r.v[i];
        }
  }

  // Stores an item's sums. Pairs of tokens become pairs of rows, which are side by side in y.
  DEVICE void store_sums(int item, float (*sums)[N / 8][4]) const {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      const int tile = tile_of(item, (threadIdx.x >> 7) * TILES + u / SPANS);
      if (tile >= p.outputs / 64) continue;
      const int row = tile * 64 + warp * 16;
      float bias[2];
#pragma unroll
      for (int h = 0; h < 2; h++) bias[h] = p.bias ? to_float(p.bias[row + h * 8 + g]) : 0.f;
#pragma unroll
      for (int n = 0; n < N / 8; n++) {
        const int token = first_token(item, u, n) + g;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const unsigned low = to_number(sums[u][n][h * 2] + bias[h]), high = to_number(sums[u][n][h * 2 + 1] + bias[h]);
          const unsigned pair = transpose(low | high << 16);
          if (token < p.tokens) *(unsigned*)(p.y + (size_t)token * p.outputs + row + h * 8 + t * 2) = pair;
        }
      }
    }
  }

  DEVICE void consume(Place place, Operands& now, unsigned lane_bits) const {
    Operands next;
    int stage = 0, phase = 0;
#pragma unroll 1
    while (place.at < run.end) {
      const int item = place.item, end = min((item + 1) * run.blocks, run.end);
      float sums[UNITS][N / 8][4] = {};
#pragma unroll 1
      while (place.at < end) {
        place.move(1, run.blocks);
        load(next, place);
        wait_barrier(filled() + stage, phase);
        multiply(sums, now, stage, lane_bits);
        if (lane == 0) arrive(used() + stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        now = next;
      }
      if (run.has_whole(item)) store_sums(item, sums); else store_part(item, sums);
    }
    finish();
  }

  DEVICE void finish() const {
    if (run.shared_item(0) < 0 && run.shared_item(1) < 0) return;
    wait_threads<MULTIPLIERS * 128>();
    if (threadIdx.x < 2) is_last()[threadIdx.x] = run.is_last(p, run.shared_item(threadIdx.x));
    wait_threads<MULTIPLIERS * 128>();
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      if (!is_last()[which]) continue;
      const int item = run.shared_item(which);
      const int first = run.owner(item * run.blocks), last = run.owner((item + 1) * run.blocks - 1);
      float sums[UNITS][N / 8][4] = {};
#pragma unroll 1
      for (int program = first; program <= last; program++)
        add_part(item, sums, part(program, program == first ? run.part_of(first, item) : 0));
      store_sums(item, sums);
    }
  }

  DEVICE void work() const {
    const bool produces = threadIdx.x >= MULTIPLIERS * 128;
    const Place place = run.place(run.begin);
    Operands now;
    U4 x[PIECES];
    if (produces) {
      load(x, place, 0);
      Place far = place;
      for (int i = 0; i < p.ahead; i++) {
        if (i > 0) fetch_block(far);
        far.move(1, run.blocks);
      }
    } else {
      load(now, place);
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) {
        begin_barrier(filled() + i, 128);
        begin_barrier(used() + i, MULTIPLIERS * 4);
      }
    }
    const unsigned lane_bits = fill_table<WIDE_THREADS>(p);
    if (produces) {
      take_registers<PRODUCER_REGISTERS, false>();
      produce(place, x);
    } else {
      take_registers<MULTIPLIER_REGISTERS, true>();
      consume(place, now, lane_bits);
    }
  }
};

KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_16(const Linear p) { Wide<16, 2, 1, 2>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_32(const Linear p) { Wide<32, 2, 1, 2>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_64(const Linear p) { Wide<64, 2, 1, 2>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_64n(const Linear p) { Wide<64, 1, 1, 1>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_128(const Linear p) { Wide<64, 1, 2, 2>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_128r(const Linear p) { Wide<64, 2, 2, 1>(p).work(); }
#endif
