// x @ W.T with weights of four bits that are not those of experts, for 17 tokens and more, on GPUs of compute capability 9.0.
// It follows four_bit.cu, whose packing, table of pairs, runs and parts it shares.
//
// Idea: a warpgroup looks its rows' codes up, multiplies the values by their scales and rounds them, as for many tokens. They
// are wgmma's first operand, from registers. So its sums are those of an item from the first block to the last, and
// nothing else takes registers: an item has up to 256 rows and 128 tokens. While a tile of 64 rows is multiplied, the next
// one's codes are looked up. One more warpgroup copies x, codes and scales to shared memory, several blocks of 64 inputs
// ahead. The copy engine arranges x as wgmma reads it.
//
// A program begins with the last item of its run. If it shares that item with the next programs, it writes its part early, and
// the last of the item's programs, for which it is the last item, adds all parts to the sums in its registers. So a program
// waits only for programs before it, which have begun before it, and seldom has to.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !EXPERTS
#define DENSE_AT (INTEGERS ? TABLE_AT : BEHIND_TABLE)  // integers are computed, so that there is no table
#define INTEGER_BITS (IS_HALF ? 0x64006400u : 0x43004300u)  // 1024 or 128, twice. A code becomes their lowest bits.
#define SCALES_ARE_NUMBERS (SCALE == (IS_HALF ? 2 : 1))  // whether a scale is one number of the served dtype, exactly
#define MINUS_ZEROS 0x80008000u

// Describes x [N, 16] in shared memory, in rows of 128 bytes whose pieces the copy engine has exchanged.
DEVICE unsigned long long x_matrix(unsigned at) {
  return (unsigned long long)(at >> 4) | 1ull << 16 | (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
}

// The blocks of a program's run: items from the last to the first, and the blocks of each from its first one.
struct Walk {
  const Run& run;
  Item item;
  int block, left;  // left: blocks of the item that are in the run and have not been passed

  DEVICE Walk(const Run& run) : run(run) { begin(run.item_of(run.end - 1)); }
  DEVICE void begin(int number) {
    item = run.item(number);
    const int first = number * run.blocks, at = max(run.begin, first);
    block = at - first;
    left = min(run.end, first + run.blocks) - at;
  }
  DEVICE bool is_last_item() const { return item.number * run.blocks <= run.begin; }
  DEVICE bool has_blocks() const { return left > 0; }
  DEVICE void move() {
    block++;
    if (--left == 0 && !is_last_item()) begin(item.number - 1);
  }
};

// A scale as two numbers of the served dtype, each twice.
struct Scale {
  unsigned high, low;
  DEVICE Scale(float value) {
    high = twice(value);
    low = SCALES_ARE_NUMBERS ? 0 : twice(value - to_float(high & 0xFFFF));
  }
  // Returns the products, which are rounded once.
  DEVICE unsigned times(unsigned pair) const {
    return fma_pair(pair, high, SCALES_ARE_NUMBERS ? MINUS_ZEROS : fma_pair(pair, low, MINUS_ZEROS));
  }
};

// The codes, scales and zeros of a warp's 16 rows of a block, in registers.
struct Codes {
  unsigned v[4], zero[SUB][2];
  float scale[SUB][2];  // of rows g and g + 8

  // Loads them from a tile of 64 rows as wgmma needs them: see code_tiles.py.
  DEVICE void load(const unsigned char* tile, int warp, int lane) {
    const unsigned char* from = tile + warp * 512;
    if (SUB == 4) {  // a lane's four pairs of the first half of each product, and of the second half
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const U2 r = *(const U2*)(from + piece_at(lane >> 2, i * 2 + (lane >> 1 & 1)) + (lane & 1) * 8);
        v[i * 2] = r.v[0], v[i * 2 + 1] = r.v[1];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = *(const unsigned*)(from + piece_at(lane >> 2, i) + (lane & 3) * 4);
    }
    const unsigned char *scales = tile + BLOCK_BYTES, *zeros = scales + 64 * SUB * SCALE_BYTES;
#pragma unroll
    for (int i = 0; i < SUB * 2; i++) {
      const int at = i / 2 * 64 + (lane >> 2) * 8 + i % 2 * 4 + warp;
      if (SCALE == 0) {
        scale[i / 2][i % 2] = ((const float*)scales)[at];
      } else {
        const unsigned short bits = ((const unsigned short*)scales)[at];
        scale[i / 2][i % 2] = SCALE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
      }
      if (INTEGERS) zero[i / 2][i % 2] = INTEGER_BITS + (ZEROS ? zeros[at] : 8) * 0x10001u;
    }
  }

  // Returns the values in the order of the first operand's registers, times their scales.
  DEVICE void decode(unsigned (*a)[4], unsigned lane_bits) const {
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      const Scale scales[2] = {scale[s][0], scale[s][1]};
#pragma unroll
      for (int q = s * (STEPS / SUB); q < (s + 1) * (STEPS / SUB); q++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const unsigned word = v[word_of(q, i)];
          const int byte = byte_of(q, i);
          if (INTEGERS) {
            const unsigned pair = (__byte_perm(word, word >> 4, byte * 0x1111 + 0x4400) & 0xF000Fu) | INTEGER_BITS;
            a[q][i] = scales[i & 1].times(minus_zero(pair, zero[s][i & 1]));
          } else {
            a[q][i] = scales[i & 1].times(lookup(word, byte, lane_bits));
          }
        }
    }
  }
};

// An item is GROUPS * TILES * 64 rows and TOKENS tokens. GROUPS warpgroups multiply; each has TILES tiles of 64 rows.
template <int TOKENS, int GROUPS, int TILES> struct Dense {
  static constexpr int ROW_TILES = GROUPS * TILES, ROWS = ROW_TILES * 64, MULTIPLIERS = GROUPS * 128, NT = TOKENS / 8;
  static constexpr int PIECES = TILES * NT, BATCH = NT < 8 ? NT : 8;  // of a thread's sums, four in each
  static constexpr int BYTES = 229376 - (DENSE_AT - TABLE_AT);  // of shared memory for stages
  // Bytes of a stage: x; behind x of all stages the tiles.
  static constexpr int STAGE = TOKENS * 128, OPERANDS = ROW_TILES * StagedTile::BYTES;
  static constexpr int FITTING = (BYTES - 256) / (STAGE + OPERANDS), STAGES = FITTING < 4 ? FITTING : 4;
  static constexpr int PRODUCER_REGISTERS = GROUPS > 2 ? 32 : 40, MULTIPLIER_REGISTERS = GROUPS > 2 ? 112 : 232;
  static_assert(INTEGERS || !ZEROS, "only integers have zeros");
  static_assert(ROW_TILES <= 4 && STAGES >= 3, "each warp of the producer copies a tile, several stages ahead");
  using Sums = float[TILES][NT][4];
  const Linear& p;
  const Run run;
  const Groups groups;
  const int lane, g, t, warp, first_tile;  // warp: of its warpgroup; first_tile: of the warpgroup's, in the item

  DEVICE Dense(const Linear& p)
      : p(p), run(p, (p.outputs + ROWS - 1) / ROWS, (p.tokens + TOKENS - 1) / TOKENS), groups(p), lane(threadIdx.x & 31),
        g(lane >> 2), t(lane & 3), warp(threadIdx.x >> 5 & 3), first_tile((threadIdx.x >> 7) * TILES) {}

  DEVICE unsigned char* memory() const { return INTEGERS ? all_shared() : behind_table(); }
  DEVICE unsigned char* operands(int stage, int tile) const {
    return memory() + STAGES * STAGE + (stage * ROW_TILES + tile) * StagedTile::BYTES;
  }
  DEVICE Barrier* filled() const { return (Barrier*)operands(STAGES, 0); }  // one of each stage
  DEVICE Barrier* used() const { return filled() + STAGES; }

  DEVICE void begin_barriers() const {
    for (int i = 0; i < STAGES; i++) {
      begin_barrier(filled() + i, 4);
      begin_barrier(used() + i, GROUPS * 4);
    }
    show_barriers();
  }

  // Begins to copy the codes, scales and zeros of a tile of 64 rows. The last tile takes the place of those behind it,
  // which are not stored.
  DEVICE void copy_operands(const Walk& place, int stage) const {
    const int tile = min(place.item.rows * ROW_TILES + warp, p.outputs / 64 - 1);
    StagedTile::copy(operands(stage, warp), p, groups, tile * run.blocks + place.block, filled() + stage);
  }

  // Each warp of the producer copies a tile, and the last one x. What comes from the weight does not wait for the former
  // kernel. A lane of the warp calls it.
  DEVICE void produce() const {
    const bool has_tile = warp < ROW_TILES, has_x = warp == 3;
    Walk ahead(run), now(run);
    for (int i = 0; i < STAGES && ahead.has_blocks(); i++) {
      if (has_tile) copy_operands(ahead, i);
      ahead.move();
    }
    wait_for_former();
    int stage = 0, phase = 0;
#pragma unroll 1
    for (int i = 0; now.has_blocks(); i++) {
      if (i >= STAGES) {
        wait_barrier(used() + stage, phase ^ 1);
        if (has_tile) copy_operands(now, stage);
      }
      if (has_x) {
        expect_bytes(filled() + stage, STAGE);
        copy_matrix(memory() + stage * STAGE, &p.x_map, now.block * 64, now.item.span * TOKENS, filled() + stage);
      }
      arrive(filled() + stage);
      now.move();
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  }

  DEVICE void issue(float (*sums)[4], unsigned (*a)[4], int stage) const {
    const unsigned x = DENSE_AT + stage * STAGE;
    begin_wgmma();
#pragma unroll
    for (int q = 0; q < STEPS; q++) Wgmma<TOKENS>::run(sums, a[q], x_matrix(x + q * 32), true);
    close_wgmma();
  }

  // Multiplies the block in stage NOW, whose values of tile 0 are in a[0]. Then those of the next block are there. The codes of
  // the next tile are loaded while one is multiplied; they become values when the products that read the same registers
  // have ended. `phase` is that of the next block's barrier.
  template <int NOW> DEVICE void multiply(Sums& sums, unsigned (*a)[STEPS][4], int phase, bool is_first, bool is_last,
                                          unsigned lane_bits) const {
    constexpr int NEXT = (NOW + 1) % STAGES, FORMER = (NOW + STAGES - 1) % STAGES;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      Codes codes;
      const bool ends = tile == TILES - 1;
      issue(sums[tile], a[tile], NOW);
      if (ends && !is_last) wait_barrier(filled() + NEXT, phase);
      if (!ends || !is_last) codes.load(operands(ends ? NEXT : NOW, first_tile + (tile + 1) % TILES), warp, lane);
      wait_wgmma<TILES - 1>();
      if (tile == 0 && TILES > 1 && !is_first) release(FORMER);
      if (TILES == 1) release(NOW);
      if (!ends || !is_last) codes.decode(a[(tile + 1) % TILES], lane_bits);
    }
  }

  DEVICE void release(int stage) const {
    if (lane == 0) arrive(used() + stage);
  }

  // Multiplies the next block if it is in stage NOW, and then those in the stages behind it. So addresses are constants.
  template <int NOW> DEVICE void multiply_from(Sums& sums, unsigned (*a)[STEPS][4], int& stage, int& phase, int steps, int& left,
                                               bool ends, unsigned lane_bits) const {
    if constexpr (NOW < STAGES) {
      if (stage == NOW && left > 0) {
        if (NOW == STAGES - 1) phase ^= 1;
        multiply<NOW>(sums, a, phase, left == steps, ends && left == 1, lane_bits);
        stage = (NOW + 1) % STAGES;
        left--;
      }
      multiply_from<NOW + 1>(sums, a, stage, phase, steps, left, ends, lane_bits);
    }
  }

  DEVICE void consume(unsigned lane_bits) const {
    unsigned a[TILES][STEPS][4];
    int stage = 0, phase = 0;
    Codes codes;
    wait_barrier(filled(), 0);
    codes.load(operands(0, first_tile), warp, lane);
    codes.decode(a[0], lane_bits);
#pragma unroll 1
    for (Walk walk(run);; walk.begin(walk.item.number - 1)) {
      Sums sums = {};
      const bool ends = walk.is_last_item();
      int left = walk.left;
#pragma unroll 1
      while (left > 0) multiply_from<0>(sums, a, stage, phase, walk.left, left, ends, lane_bits);
      finish_wgmma(sums);
      if (TILES > 1) release((stage + STAGES - 1) % STAGES);
      close_item(walk.item, sums);
      if (ends) return;
    }
  }

  DEVICE F4* part(int program) const { return (F4*)(p.parts + (size_t)program * TOKENS * ROWS) + threadIdx.x; }
  // Returns whether eight tokens of a piece of the sums exist.
  DEVICE bool has_tokens(const Item& item, int piece) const { return item.span * TOKENS + piece % NT * 8 < p.tokens; }

  // Stores a piece: eight tokens' sums. Pairs of tokens become pairs of rows, which are side by side in y, and neighboring
  // lanes exchange theirs, so that the four lanes of a token write 32 bytes side by side.
  DEVICE void store(const Item& item, int piece, const float* sums) const {
    const int tile = item.rows * ROW_TILES + first_tile + piece / NT, token = item.span * TOKENS + piece % NT * 8 + g;
    if (tile >= p.outputs / 64) return;
    const int row = tile * 64 + warp * 16;
    unsigned pair[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float bias = p.bias ? to_float(p.bias[row + h * 8 + g]) : 0.f;
      const unsigned low = to_number(sums[h * 2] + bias), high = to_number(sums[h * 2 + 1] + bias);
      pair[h] = transpose(low | high << 16);
    }
    const bool odd = t & 1;  // such a lane writes the second eight rows
    const unsigned other = from_lane(odd ? pair[0] : pair[1], lane ^ 1);
    U2* to = (U2*)(p.y + (size_t)token * p.outputs + row + odd * 8 + (t & 2) * 2);
    if (token < p.tokens) *to = odd ? U2{{other, pair[1]}} : U2{{pair[0], other}};
  }

  // Stores an item, or writes the program's part of it.
  DEVICE void close_item(const Item& item, Sums& sums) const {
    const int last = run.last_owner(item.number);
    int* ticket = p.tickets + last;  // of the item: a program is the last one of one item that is shared
    if (last != (int)blockIdx.x) {
      F4* to = part(blockIdx.x);
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        const float* own = sums[i / NT][i % NT];
        if (has_tokens(item, i)) to[i * MULTIPLIERS] = F4{{own[0], own[1], own[2], own[3]}};
      }
      __syncwarp();
      if (lane == 0) count_ticket(ticket);
      return;
    }
    const int first = run.first_owner(item.number);
    if (first < last) collect(item, first, ticket, sums);
#pragma unroll
    for (int i = 0; i < PIECES; i++)
      if (has_tokens(item, i)) store(item, i, sums[i / NT][i % NT]);
  }

  // Adds the parts of the programs from `first` to the one before this one.
  DEVICE void collect(const Item& item, int first, int* ticket, Sums& sums) const {
    if (lane == 0)
      while (load_ticket(ticket) < ((int)blockIdx.x - first) * GROUPS * 4) {}
    __syncwarp();
#pragma unroll 1
    for (int program = first; program < (int)blockIdx.x; program++) {
#pragma unroll
      for (int n = 0; n < NT; n += BATCH) {
        if (!has_tokens(item, n)) break;  // the loads of a batch are in flight together, so they have no branches
        F4 r[TILES][BATCH];
#pragma unroll
        for (int i = 0; i < TILES * BATCH; i++)
          r[i / BATCH][i % BATCH] = load_shared_by_programs(part(program) + (i / BATCH * NT + n + i % BATCH) * MULTIPLIERS);
#pragma unroll
        for (int i = 0; i < TILES * BATCH * 4; i++)
          sums[i / 4 / BATCH][n + i / 4 % BATCH][i % 4] += r[i / 4 / BATCH][i / 4 % BATCH].v[i % 4];
      }
    }
    wait_threads<MULTIPLIERS>();  // all warps have seen the ticket
    if (threadIdx.x == 0) *ticket = 0;
  }

  DEVICE void work() const {
    const bool produces = threadIdx.x >= MULTIPLIERS;
    begin_next();
    if (run.is_empty()) {
      wait_for_former();
      return;
    }
    if (threadIdx.x == MULTIPLIERS) begin_barriers();
    if (threadIdx.x == MULTIPLIERS + 96) fetch_map(&p.x_map);
    __syncthreads();
    if (produces) {
      take_registers<PRODUCER_REGISTERS, false>();
      if (lane == 0) produce();
    } else {
      take_registers<MULTIPLIER_REGISTERS, true>();
      if (!INTEGERS) write_table<MULTIPLIERS>(p);
      wait_threads<MULTIPLIERS>();
      wait_for_former();
      consume(lane_part(lane));
    }
  }
};

#define DENSE_KERNEL(NAME, TOKENS, GROUPS, TILES)                                                \
  KERNEL void __launch_bounds__((GROUPS + 1) * 128, 1) NAME(const __grid_constant__ Linear p) {  \
    Dense<TOKENS, GROUPS, TILES>(p).work();                                                      \
  }
DENSE_KERNEL(dense_32, 32, 4, 1)
DENSE_KERNEL(dense_64, 64, 4, 1)
DENSE_KERNEL(dense_128, 128, 2, 2)
// For weights of few rows, whose items more programs would share:
DENSE_KERNEL(narrow_64, 64, 2, 1)
DENSE_KERNEL(narrow_128, 128, 2, 1)
#endif
