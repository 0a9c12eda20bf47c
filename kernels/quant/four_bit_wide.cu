// x @ W.T with the weights of four bits of a mixture's experts, for tiles of 32 pairs and more, on GPUs of compute capability
// 9.0. It follows four_bit.cu, whose packing, table of pairs, runs and parts it shares.
//
// Idea: a warpgroup looks its rows' codes up once and multiplies them by up to 128 tokens with wgmma, whose first operand
// lies in registers and whose second operand, x, lies in shared memory. A warpgroup has two tiles of 64 rows: while one is
// multiplied, the other one's codes are looked up and its sums are scaled. One more warpgroup produces: it copies codes and
// scales to shared memory, several blocks of 64 inputs ahead, and writes x there with its inputs in the order of the codes'
// products. A fence before wgmma waits for all loads of a warp, so each warp of the producer has a block of its own.
// Programs that share an item wait for each other, and each adds up a share of the parts: one program alone would take longer
// to add them than the products take. So they must all run at once.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && EXPERTS
#define MULTIPLIERS 2  // warpgroups that multiply
#define WIDE_THREADS ((MULTIPLIERS + 1) * 128)
#define WIDE_BYTES 163840  // shared memory behind the table

// Describes B [16, N] in shared memory: two rows of core matrices, `core` bytes apart, whose matrices are 128 bytes apart.
DEVICE unsigned long long matrix(unsigned at, int core) {
  return (unsigned long long)(at >> 4) | (unsigned long long)(core >> 4) << 16 | (unsigned long long)(128 >> 4) << 32;
}

// An item is 256 rows and SPANS * N tokens. A warpgroup has two tiles of 64 rows.
template <int N, int SPANS> struct Wide {
  static constexpr int TOKENS = N * SPANS, TILES = 2, ROWS = MULTIPLIERS * TILES * 64, UNITS = TILES * SPANS;
  // Bytes of a stage: x; behind x of all stages four tiles.
  static constexpr int STAGE = TOKENS * 128, OPERANDS = ROWS / 64 * StagedTile::BYTES;
  static constexpr int FITTING = (WIDE_BYTES - 256) / (STAGE + OPERANDS), STAGES = FITTING < 6 ? FITTING : 6;
  static constexpr int CORE = TOKENS * 16;  // bytes of 8 inputs of all tokens
  static constexpr int GROUP_STEPS = STEPS / SUB;
  // A piece of x is 8 tokens by 32 inputs. A warp of the producer loads as many at a time as its registers hold.
  static constexpr int PIECES = TOKENS / 4 < 8 ? TOKENS / 4 : 8, BATCHES = TOKENS / 4 / PIECES;
  static constexpr int PRODUCER_REGISTERS = SUB == 1 ? 56 : 72, MULTIPLIER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;
  const Linear& p;
  const Run run;
  const Groups groups;
  const int lane, g, t, warp;  // warp: of its warpgroup

  DEVICE Wide(const Linear& p)
      : p(p), run(p, (p.outputs + ROWS - 1) / ROWS, *p.used_tiles), groups(p), lane(threadIdx.x & 31),
        g(lane >> 2), t(lane & 3), warp(threadIdx.x >> 5 & 3) {}

  DEVICE unsigned char* operands(int stage, int tile) const {
    return behind_table() + STAGES * STAGE + (stage * (ROWS / 64) + tile) * StagedTile::BYTES;
  }
  DEVICE Barrier* filled() const { return (Barrier*)operands(STAGES, 0); }  // one of each stage
  DEVICE Barrier* used() const { return filled() + STAGES; }

  // Returns the block of a tile of 64 rows. It is that of the last tile for those behind it, which are not stored.
  DEVICE int held_block(const Place& place, int index) const {
    const int tiles = p.outputs / 64, tile = min(place.item.rows * (ROWS / 64) + index, tiles - 1);
    return (__ldg(p.expert_of_tile + place.item.span) * tiles + tile) * run.blocks + place.block;
  }

  DEVICE void load_x(U4* x, const Place& place, int batch) const {
#pragma unroll
    for (int i = 0; i < PIECES; i += 2) {
      const int row = x_row(p, y_row(p, place.item.span, TOKENS, batch * PIECES * 4 + i * 4 + g));
      x[i] = x[i + 1] = U4{{0, 0, 0, 0}};
      if (row < 0) continue;
      const unsigned short* from = p.x + (size_t)row * p.inputs + place.block * 64 + t * 8;
      x[i] = load_x_16(from);
      x[i + 1] = load_x_16(from + 32);
    }
  }

  // Writes what was loaded. Core matrices of wgmma are 8 tokens by 8 inputs, of which a token's are 16 bytes.
  DEVICE void store_x(const U4* x, int stage, int batch) const {
    unsigned char* at = behind_table() + stage * STAGE + batch * PIECES * 64 + g * 16;
#pragma unroll
    for (int i = 0; i < PIECES; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int core = SUB == 4 ? i % 2 * 4 + (t >> 1) * 2 + (k & 1) : i % 2 * 4 + k;
        const int word = SUB == 4 ? (t & 1) * 2 + (k >> 1) : t;
        *(unsigned*)(at + core * CORE + i / 2 * 128 + word * 4) = x[i].v[k];
      }
  }

  // Begins to copy the operands of a stage. A lane copies those of a tile.
  DEVICE void copy_operands(const Place& place, int stage) const {
    if (lane >= ROWS / 64) return;
    StagedTile::copy(operands(stage, lane), p, groups, held_block(place, lane), filled() + stage);
  }

  // Begins the barriers and the copies of all stages. A warp calls it.
  DEVICE void begin_copies(Place place) const {
    if (lane == 0) {
      for (int i = 0; i < STAGES; i++) {
        begin_barrier(filled() + i, 32);
        begin_barrier(used() + i, MULTIPLIERS * 4);
      }
      show_barriers();
    }
    __syncwarp();
    for (int i = 0; i < STAGES && place.at < run.end; i++) {
      copy_operands(place, i);
      place.move(1, run);
    }
  }

  // Warps take blocks in turn. Each waits for its own loads and stores before wgmma may see them.
  DEVICE void produce(Place place) const {
    for (int i = 0; i < warp; i++) place.move(1, run);
    U4 x[PIECES];
#pragma unroll 1
    for (int i = warp; place.at < run.end; i += 4) {
      const int stage = i % STAGES;
      load_x(x, place, 0);
      wait_barrier(used() + stage, i / STAGES + 1 & 1);
      if (i >= STAGES) copy_operands(place, stage);  // the first ones are in flight already
      store_x(x, stage, 0);
#pragma unroll 1
      for (int batch = 1; batch < BATCHES; batch++) {
        load_x(x, place, batch);
        store_x(x, stage, batch);
      }
      show_to_wgmma();
      arrive(filled() + stage);
#pragma unroll
      for (int k = 0; k < 4; k++) place.move(1, run);
    }
  }

  // Returns the scale of row g or g + 8 of a warp's 16 rows.
  DEVICE float scale(int stage, int m, int s, int h) const {
    const unsigned char* scales = operands(stage, (threadIdx.x >> 7) * TILES + m) + BLOCK_BYTES;
    const int at = s * 64 + g * 8 + h * 4 + warp;
    if (SCALE == 0) return ((const float*)scales)[at];
    const unsigned short bits = ((const unsigned short*)scales)[at];
    return SCALE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
  }

  // Looks up the codes of a group or a block, of 16 rows for a warp.
  DEVICE void decode(unsigned (*a)[4], int stage, int m, int s, unsigned lane_bits) const {
    const unsigned char* from = operands(stage, (threadIdx.x >> 7) * TILES + m);
    const U4 code = *(const U4*)(from + warp * 512 + codes_of_lane(lane));
    unsigned zero[2];
#pragma unroll
    for (int h = 0; h < 2; h++) zero[h] = ZEROS ? zero_pair(from[StagedTile::ZEROS_AT + s * 64 + g * 8 + h * 4 + warp], 0) : 0;
#pragma unroll
    for (int q = 0; q < GROUP_STEPS; q++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[q][i] = operand(code, s * GROUP_STEPS + q, i, lane_bits);
        if (ZEROS) a[q][i] = minus_zero(a[q][i], zero[i & 1]);
      }
  }

  DEVICE void issue(float (*c)[4], unsigned (*a)[4], int stage, int s, int span) const {
    const unsigned x = BEHIND_TABLE + stage * STAGE + s * GROUP_STEPS * 2 * CORE + span * N * 16;
    begin_wgmma();
#pragma unroll
    for (int q = 0; q < GROUP_STEPS; q++) Wgmma<N>::run(c, a[q], matrix(x + q * 2 * CORE, CORE), q > 0);
    close_wgmma();
  }

  // Adds products of a tile, times their scales.
  DEVICE void add(float (*sums)[4], const float (*c)[4], int stage, int m, int s) const {
    const float scales[2] = {scale(stage, m, s, 0), scale(stage, m, s, 1)};
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[n][i] += scales[i >> 1] * c[n][i];
  }

  // Returns the row of y of a token of eight, or -1.
  DEVICE int y_row_of(const Item& item, int u, int n, int token) const {
    return y_row(p, item.span, TOKENS, u % SPANS * N + n * 8 + token);
  }

  // The sums of a program's part lie by thread. All programs have the same threads for the same sums.
  DEVICE F4* part(int program, int index) const { return (F4*)(p.parts + (size_t)(program * 2 + index) * TOKENS * ROWS); }

  // Stores eight tokens' sums. Pairs of tokens become pairs of rows, which are side by side in y.
  DEVICE void store(const Item& item, int u, int n, const float* sums) const {
    const int tile = item.rows * (ROWS / 64) + (threadIdx.x >> 7) * TILES + u / SPANS;
    if (tile >= p.outputs / 64) return;
    const int row = tile * 64 + warp * 16, token = y_row_of(item, u, n, g);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float bias = p.bias ? to_float(p.bias[row + h * 8 + g]) : 0.f;
      const unsigned low = to_number(sums[h * 2] + bias), high = to_number(sums[h * 2 + 1] + bias);
      const unsigned pair = transpose(low | high << 16);
      if (token >= 0) *(unsigned*)(p.y + (size_t)token * p.outputs + row + h * 8 + t * 2) = pair;
    }
  }

  DEVICE void close_item(const Item& item, float (*sums)[N / 8][4]) const {
    const bool whole = run.has_whole(item.number);
    F4* to = part(blockIdx.x, run.part_of(blockIdx.x, item.number));
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int n = 0; n < N / 8; n++) {
        // A whole item's tiles of rows are looked up at once, without a branch for each eight tokens.
        if (!whole && y_row_of(item, u, n, 0) < 0) continue;
        if (whole)
          store(item, u, n, sums[u][n]);
        else
          to[(u * (N / 8) + n) * MULTIPLIERS * 128 + threadIdx.x] = F4{{sums[u][n][0], sums[u][n][1], sums[u][n][2], sums[u][n][3]}};
      }
  }

  // Multiplies a block, whose values of tile 0 are in `a` already, and looks up those of the next block's tile 0. The next
  // block is in the stage `next`, which is -1 if there is none.
  DEVICE void multiply(float (*sums)[N / 8][4], unsigned (*a)[GROUP_STEPS][4], int stage, int next, int next_phase,
                       unsigned lane_bits) const {
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      float c[SPANS == 1 ? TILES : 1][N / 8][4];
#pragma unroll
      for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int span = 0; span < SPANS; span++) {
          issue(c[SPANS == 1 ? m : 0], a[m], stage, s, span);
          if (SPANS == 1 && m == 1) {
            wait_wgmma<1>(c[0]);
            add(sums[0], c[0], stage, 0, s);
          }
          if (span == 0) {
            if (m == 0) {
              decode(a[1], stage, 1, s, lane_bits);
            } else if (s < SUB - 1) {
              decode(a[0], stage, 0, s + 1, lane_bits);
            } else if (next >= 0) {
              wait_barrier(filled() + next, next_phase);
              decode(a[0], next, 0, 0, lane_bits);
            }
          }
          if (SPANS > 1) {
            wait_wgmma<0>(c[0]);
            add(sums[m * SPANS + span], c[0], stage, m, s);
          }
        }
      }
      if (SPANS == 1) {
        wait_wgmma<0>(c[TILES - 1]);
        add(sums[1], c[TILES - 1], stage, 1, s);
      }
    }
  }

  DEVICE void consume(Place place, unsigned lane_bits) const {
    unsigned a[TILES][GROUP_STEPS][4];
    int stage = 0, phase = 0;
    wait_barrier(filled(), 0);
    decode(a[0], 0, 0, 0, lane_bits);
#pragma unroll 1
    while (place.at < run.end) {
      float sums[UNITS][N / 8][4] = {};
      const int steps = min(run.blocks - place.block, run.end - place.at);
#pragma unroll 1
      for (int step = 0; step < steps; step++) {
        const int now = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
        multiply(sums, a, now, place.at + step + 1 < run.end ? stage : -1, phase, lane_bits);
        __syncwarp();  // all lanes have read their scales
        if (lane == 0) arrive(used() + now);
      }
      close_item(place.item, sums);
      place.move(steps, run);
    }
    finish();
  }

  // Adds the parts of shared items. All programs of an item wait for each other and share its sums, so all must run at once.
  DEVICE void finish() const {
    if (run.shared_item(0) < 0 && run.shared_item(1) < 0) return;
    wait_threads<MULTIPLIERS * 128>();
    if (threadIdx.x < 2 && run.shared_item(threadIdx.x) >= 0) {
      __threadfence();
      atomicAdd(run.ticket(p, run.shared_item(threadIdx.x)), 1);
    }
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      if (run.shared_item(which) < 0) continue;
      const Item item = run.item(run.shared_item(which));
      const int first = run.first_owner(item.number), count = run.last_owner(item.number) - first + 1;
      int* ticket = run.ticket(p, item.number);
      if (threadIdx.x == 0) {
        while (load_ticket(ticket) < count) {}
        __threadfence();
      }
      wait_threads<MULTIPLIERS * 128>();
      const F4* parts = part(first, run.part_of(first, item.number)) + threadIdx.x;
      const F4* others = part(first, 0) + threadIdx.x;
      const int own = blockIdx.x - first;
#pragma unroll 2
      for (int i = own; i < UNITS * (N / 8); i += count) {
        const int u = i / (N / 8), n = i % (N / 8);
        if (y_row_of(item, u, n, 0) < 0) continue;
        F4 sum = load_shared_by_programs(parts + i * MULTIPLIERS * 128);
#pragma unroll 8
        for (int k = 1; k < count; k++) {
          const F4 r = load_shared_by_programs(others + (k * 2 * (TOKENS * ROWS / 4) + i * MULTIPLIERS * 128));
#pragma unroll
          for (int j = 0; j < 4; j++) sum.v[j] += r.v[j];
        }
        store(item, u, n, sum.v);
      }
      if (threadIdx.x == 0 && atomicAdd(ticket, 1) == 2 * count - 1) *ticket = 0;
    }
  }

  DEVICE void work() const {
    const bool produces = threadIdx.x >= MULTIPLIERS * 128;
    begin_next();
    if (run.is_empty()) {
      wait_for_former();
      return;
    }
    const Place place = run.place(run.begin);
    if (produces && warp == 0) begin_copies(place);
    const unsigned lane_bits = fill_table<WIDE_THREADS>(p);
    wait_for_former();
    if (produces) {
      take_registers<PRODUCER_REGISTERS, false>();
      produce(place);
    } else {
      take_registers<MULTIPLIER_REGISTERS, true>();
      consume(place, lane_bits);
    }
  }
};

KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_32(const Linear p) { Wide<32, 1>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_64(const Linear p) { Wide<64, 1>(p).work(); }
KERNEL void __launch_bounds__(WIDE_THREADS, 1) wide_128(const Linear p) { Wide<64, 2>(p).work(); }
#endif
