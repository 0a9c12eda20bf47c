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

// A place in a program's run, with its item's rows and span of tokens.
struct WidePlace {
  int at, block, rows, span;
  DEVICE void move(int blocks, int spans) {
    at++;
    if (++block < blocks) return;
    block = 0;
    if (++span < spans) return;
    span = 0;
    rows++;
  }
  // Moves by several blocks of one item.
  DEVICE void skip(int count, int blocks, int spans) {
    at += count - 1;
    block += count - 1;
    move(blocks, spans);
  }
};

// An item is 256 rows and SPANS * N tokens. A warpgroup has two tiles of 64 rows.
template <int N, int SPANS> struct Wide {
  static constexpr int TOKENS = N * SPANS, TILES = 2, ROWS = MULTIPLIERS * TILES * 64, UNITS = TILES * SPANS;
  static constexpr int STAGE = TOKENS * 128, FITTING = STAGE_BYTES / STAGE, STAGES = FITTING < 8 ? FITTING : 8;
  static constexpr int CORE = TOKENS * 16;  // bytes of 8 inputs of all tokens
  static constexpr int GROUP_STEPS = STEPS / SUB;
  static constexpr int BATCHES = SPANS, PIECES = N / 16, DEPTH = SPANS == 1 && SUB == 1 ? 4 : 2;
  static constexpr int PRODUCER_REGISTERS = DEPTH == 4 ? 88 : 56, MULTIPLIER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;
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

  DEVICE WidePlace first_place() const {
    const Place place = run.place(run.begin);
    return WidePlace{place.at, place.block, place.item / spans, place.item % spans};
  }

  // Returns a tile of 64 rows, which is the last one for those behind it. They are not stored.
  DEVICE int held_tile(int rows, int index) const { return min(rows * (ROWS / 64) + index, p.outputs / 64 - 1); }

  // Loads a batch of x into registers: N tokens by 64 inputs, of which a warp has 8 tokens by 32 inputs in a piece.
  DEVICE void load_x(U4* x, const WidePlace& place, int batch) const {
    if (place.at >= run.end) return;
    const int first = place.span * TOKENS + batch * N + (warp >> 1) * 8 + g;
    const unsigned short* from = p.x + (size_t)first * p.inputs + place.block * 64 + (warp & 1) * 32 + t * 8;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      x[i] = U4{{0, 0, 0, 0}};
      if (first + i * 16 < p.tokens) x[i] = load_16(from + (size_t)i * 16 * p.inputs);
    }
  }

  // Writes a batch. Core matrices of wgmma are 8 tokens by 8 inputs, of which a token's are 16 bytes.
  DEVICE void store_x(const U4* x, int stage, int batch) const {
    const int half = warp & 1;
    unsigned char* at = above_table() + stage * STAGE + batch * N * 16 + (warp >> 1) * 128 + g * 16;
#pragma unroll
    for (int i = 0; i < PIECES; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int core = SUB == 4 ? half * 4 + (t >> 1) * 2 + (k & 1) : half * 4 + k;
        const int word = SUB == 4 ? (t & 1) * 2 + (k >> 1) : t;
        *(unsigned*)(at + core * CORE + i * 256 + word * 4) = x[i].v[k];
      }
  }

  // Fetches a block's codes and its groups' numbers into the L2 cache.
  DEVICE void fetch_block(const WidePlace& place) const {
    const int index = threadIdx.x - MULTIPLIERS * 128;
    if (index >= ROWS / 64 || place.at >= run.end) return;
    const int block = held_tile(place.rows, index) * run.blocks + place.block;
    const size_t group = (size_t)groups.first_of(block) * 64;
    fetch_into_cache(p.codes + (size_t)block * BLOCK_BYTES, BLOCK_BYTES);
    fetch_into_cache(p.scales + group * SCALE_BYTES, 64 * SUB * SCALE_BYTES);
    if (ZEROS) fetch_into_cache(p.zeros + group, 64 * SUB);
  }

  DEVICE void next_batch(WidePlace& place, int& batch) const {
    if (++batch < BATCHES) return;
    batch = 0;
    place.move(run.blocks, spans);
  }

  DEVICE void produce(U4 (*x)[PIECES], WidePlace place, int batch, WidePlace far) const {
    int at = run.begin, own = 0, stage = 0, phase = 1;
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        if (at >= run.end) return;
        if (own == 0) wait_barrier(used() + stage, phase);
        store_x(x[d], stage, own);
        if (++own == BATCHES) {
          show_to_wgmma();
          arrive(filled() + stage);
          own = 0;
          at++;
          if (++stage == STAGES) stage = 0, phase ^= 1;
          if (p.ahead) {
            fetch_block(far);
            far.move(run.blocks, spans);
          }
        } else {
          show_to_wgmma();
        }
        load_x(x[d], place, batch);
        next_batch(place, batch);
      }
    }
  }

  // What a warpgroup multiplies in a block of 64 inputs, for a tile of 64 rows.
  struct Operands {
    U4 code;
    float scale[SUB][2];  // rows g and g + 8 of the warp's 16
    unsigned zero[SUB][2];
  };

  DEVICE void load(Operands& to, const WidePlace& place, int m) const {
    const int block = held_tile(place.rows, (threadIdx.x >> 7) * TILES + m) * run.blocks + place.block;
    to.code = load_once(p.codes + (size_t)block * BLOCK_BYTES + warp * 512 + lane * 16);
    const size_t group = (size_t)groups.first_of(block) * 64 + g * 8 + warp;
#pragma unroll
    for (int s = 0; s < SUB; s++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const size_t at = group + s * 64 + h * 4;
        to.scale[s][h] = load_scale(p.scales, at);
        if (ZEROS) to.zero[s][h] = p.zeros[at];
      }
  }

  static DEVICE float load_scale(const unsigned char* scales, size_t at) {
    if (SCALE == 0) return ((const float*)scales)[at];
    const unsigned short bits = ((const unsigned short*)scales)[at];
    return SCALE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
  }

  DEVICE void decode(unsigned (*a)[4], const Operands& from, int s, unsigned lane_bits) const {
    unsigned zero[2];
#pragma unroll
    for (int h = 0; h < 2; h++) zero[h] = ZEROS ? zero_pair(from.zero[s][h], 0) : 0;
#pragma unroll
    for (int q = 0; q < GROUP_STEPS; q++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[q][i] = lookup(from.code.v[s * GROUP_STEPS + q], i, lane_bits);
        if (ZEROS) a[q][i] = minus_zero(a[q][i], zero[i & 1]);
      }
  }

  DEVICE void issue(float (*c)[4], unsigned (*a)[4], int stage, int s, int span) const {
    const unsigned x = ABOVE_TABLE + stage * STAGE + s * GROUP_STEPS * 2 * CORE + span * N * 16;
    begin_wgmma();
#pragma unroll
    for (int q = 0; q < GROUP_STEPS; q++) Wgmma<N>::run(c, a[q], matrix(x + q * 2 * CORE, CORE), q > 0);
    close_wgmma();
  }

  static DEVICE void add(float (*sums)[4], const float (*c)[4], const float* scale) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[n][i] += scale[i >> 1] * c[n][i];
  }

  DEVICE int first_token(int span, int u, int n) const { return span * TOKENS + u % SPANS * N + n * 8; }

  // The sums of a program's part lie by thread. All programs have the same threads for the same sums.
  DEVICE F4* part(int program, int index) const { return (F4*)(p.parts + (size_t)(program * 2 + index) * TOKENS * ROWS); }

  // Stores eight tokens' sums. Pairs of tokens become pairs of rows, which are side by side in y.
  DEVICE void store(int rows, int span, int u, int n, const float* sums) const {
    const int tile = rows * (ROWS / 64) + (threadIdx.x >> 7) * TILES + u / SPANS;
    if (tile >= p.outputs / 64) return;
    const int row = tile * 64 + warp * 16, token = first_token(span, u, n) + g;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float bias = p.bias ? to_float(p.bias[row + h * 8 + g]) : 0.f;
      const unsigned low = to_number(sums[h * 2] + bias), high = to_number(sums[h * 2 + 1] + bias);
      const unsigned pair = transpose(low | high << 16);
      if (token < p.tokens) *(unsigned*)(p.y + (size_t)token * p.outputs + row + h * 8 + t * 2) = pair;
    }
  }

  DEVICE void close_item(const WidePlace& place, float (*sums)[N / 8][4]) const {
    const int item = place.rows * spans + place.span;
    const bool whole = run.has_whole(item);
    F4* to = part(blockIdx.x, run.part_of(blockIdx.x, item));
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int n = 0; n < N / 8; n++) {
        if (first_token(place.span, u, n) >= p.tokens) continue;
        if (whole)
          store(place.rows, place.span, u, n, sums[u][n]);
        else
          to[(u * (N / 8) + n) * MULTIPLIERS * 128 + threadIdx.x] = F4{{sums[u][n][0], sums[u][n][1], sums[u][n][2], sums[u][n][3]}};
      }
  }

  DEVICE void consume(WidePlace next_place, Operands* next, unsigned lane_bits) const {
    Operands now[TILES];
    unsigned a[TILES][GROUP_STEPS][4];
    WidePlace place = next_place;
    advance(now, next, next_place, 0);
    decode(a[0], now[0], 0, lane_bits);
    int stage = 0, phase = 0;
#pragma unroll 1
    while (place.at < run.end) {
      float sums[UNITS][N / 8][4] = {};
      const int steps = min(run.blocks - place.block, run.end - place.at);
#pragma unroll 1
      for (int step = 0; step < steps; step++) {
        wait_barrier(filled() + stage, phase);
#pragma unroll
        for (int s = 0; s < SUB; s++) {
          float c[SPANS == 1 ? TILES : 1][N / 8][4];
#pragma unroll
          for (int u = 0; u < UNITS; u++) {
            const int m = u / SPANS, span = u % SPANS;
            issue(c[SPANS == 1 ? m : 0], a[m], stage, s, span);
            // While a tile is multiplied, the other one's next codes are looked up.
            if (SPANS == 1 && m == 1) {
              wait_wgmma<1>(c[0]);
              add(sums[0], c[0], now[0].scale[s]);
            }
            if (span == 0) {
              if (m == 0 && s == 0) advance(now, next, next_place, 1);
              if (m == 1 && s == SUB - 1) advance(now, next, next_place, 0);
              decode(a[1 - m], now[1 - m], m == 0 ? s : (s + 1) % SUB, lane_bits);
            }
            if (SPANS > 1) {
              wait_wgmma<0>(c[0]);
              add(sums[u], c[0], now[m].scale[s]);
            }
          }
          if (SPANS == 1) {
            wait_wgmma<0>(c[TILES - 1]);
            add(sums[1], c[TILES - 1], now[1].scale[s]);
          }
        }
        if (lane == 0) arrive(used() + stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      close_item(place, sums);
      place.skip(steps, run.blocks, spans);
    }
    finish();
  }

  // Takes a tile's next operands and begins to load those behind them. At the run's end it loads the last ones again.
  DEVICE void advance(Operands* now, Operands* next, WidePlace& place, int m) const {
    now[m] = next[m];
    if (m == 0 && place.at + 1 < run.end) place.move(run.blocks, spans);
    load(next[m], place, m);
  }

  // Adds the parts of shared items. All programs of an item wait for each other and share its sums, so all must run at once.
  DEVICE void finish() const {
    if (run.shared_item(0) < 0 && run.shared_item(1) < 0) return;
    wait_threads<MULTIPLIERS * 128>();
    if (threadIdx.x < 2 && run.shared_item(threadIdx.x) >= 0) {
      __threadfence();
      atomicAdd(p.tickets + run.shared_item(threadIdx.x), 1);
    }
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      const int item = run.shared_item(which);
      if (item < 0) continue;
      const int first = run.owner(item * run.blocks), count = run.owner((item + 1) * run.blocks - 1) - first + 1;
      if (threadIdx.x == 0) {
        while (load_ticket(p.tickets + item) < count) {}
        __threadfence();
      }
      wait_threads<MULTIPLIERS * 128>();
      const F4* parts = part(first, run.part_of(first, item)) + threadIdx.x;
      const F4* others = part(first, 0) + threadIdx.x;
      const int own = blockIdx.x - first, rows = item / spans, span = item % spans;
#pragma unroll 2
      for (int i = own; i < UNITS * (N / 8); i += count) {
        const int u = i / (N / 8), n = i % (N / 8);
        if (first_token(span, u, n) >= p.tokens) continue;
        F4 sum = load_shared_by_programs(parts + i * MULTIPLIERS * 128);
#pragma unroll 8
        for (int k = 1; k < count; k++) {
          const F4 r = load_shared_by_programs(others + (k * 2 * (TOKENS * ROWS / 4) + i * MULTIPLIERS * 128));
#pragma unroll
          for (int j = 0; j < 4; j++) sum.v[j] += r.v[j];
        }
        store(rows, span, u, n, sum.v);
      }
      if (threadIdx.x == 0 && atomicAdd(p.tickets + item, 1) == 2 * count - 1) p.tickets[item] = 0;
    }
  }

  DEVICE void work() const {
    const bool produces = threadIdx.x >= MULTIPLIERS * 128;
    const WidePlace place = first_place();
    WidePlace ahead = place, far = place;
    int batch = 0;
    Operands next[TILES];
    U4 x[DEPTH][PIECES];
    if (produces) {
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        load_x(x[d], ahead, batch);
        next_batch(ahead, batch);
      }
      for (int i = 0; i < p.ahead; i++) {
        if (i > 1) fetch_block(far);
        far.move(run.blocks, spans);
      }
    } else {
#pragma unroll
      for (int m = 0; m < TILES; m++) load(next[m], place, m);
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
      produce(x, ahead, batch, far);
    } else {
      take_registers<MULTIPLIER_REGISTERS, true>();
      consume(place, next, lane_bits);
    }
  }
};

KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_16(const Linear p) { Wide<16, 1>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_32(const Linear p) { Wide<32, 1>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_64(const Linear p) { Wide<64, 1>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_128(const Linear p) { Wide<64, 2>(p).work(); }
#endif
