// x @ W.T with weights of four bits, for few tokens. kernels/quant/four_bit_cuda.py compiles this file with NVRTC, and after it
// four_bit_wide.cu and four_bit_dense.cu, for more tokens.
//
// Idea: with few tokens, the cost of a GEMM is the weight's bytes. A byte names a pair of values. A table of all 256 pairs
// lies in shared memory, a copy for each lane, so that a lookup has no bank conflict. It gives two values at once, which
// are one register of the tensor cores' first operand. So any code of 16 values is served, and codes go from memory
// to registers in the order that the tensor cores want (kernels/quant/code_tiles.py writes them so). Zero points are
// subtracted in registers, which is exact. Scales multiply the sums of a group in float32.
//
// Weights are the rows of the product and tokens its columns. The work is divided evenly: all blocks of 64 inputs of all
// items, one item after the other, are cut into as many runs as there are programs. Programs that share an item write
// float32 parts, and the last of them to finish adds the parts in a fixed order. So results never depend on timing.
// Sources: FLUTE, arXiv 2407.10960 (table of pairs); Stream-K, arXiv 2301.03598 (runs); Marlin, arXiv 2408.11743.
//
// The compiler is given:
//   IS_HALF  1 if x and y are float16, 0 if they are bfloat16
//   SCALE    0 if scales are float32, 1 bfloat16, 2 float16
//   SUB      groups in a block of 64 inputs: 4, 2, or 1 if a group is one block or several
//   ZEROS    1 if groups have zero points
//   INTEGERS 1 if the book is that of integers, code - 8
//   EXPERTS  1 if the weight is that of all experts of a mixture: each tile of pairs multiplies its expert's rows
//   FEW_8_WARPS, FEW_16_WARPS, FEW_32_WARPS  warps of a program, as many as have enough registers; 0 for no such kernel
//   RESIDENT  programs of few_8 and few_16 that have room on an SM together
#define SCALE_BYTES (SCALE == 0 ? 4 : 2)
#define MANY_WARPS 8
#define MANY_ROWS 128
#define X_PITCH (SUB == 4 ? 160 : 128)  // bytes of a token's 64 inputs in shared memory, see x_place()
#define SUMS_BYTES 36864   // shared memory of many()'s sums
#define STAGE_BYTES 98304  // and of its copies in flight, behind them

// Arguments of a launch; FourBitArguments in four_bit_cuda.py is the same. T tokens, O outputs, D inputs, G groups of a row.
struct Linear {
  MatrixMap x_map;               // x, for the kernels of four_bit_dense.cu
  const unsigned char* codes;    // [O / 64, D / 64, 2048], see code_tiles.py; with EXPERTS those of each expert in turn
  const unsigned char* scales;   // [O / 64, G, 8, 2, 4]
  const unsigned char* zeros;    // [O / 64, G, 8, 2, 4] uint8
  const float* book;             // [16] values
  const unsigned short* x;       // [T, D]
  const unsigned short* bias;    // [O] or null
  unsigned short* y;             // [T, O]
  float* parts;                  // [programs, 2, numbers of an item's sums]; one for a program of four_bit_dense.cu
  int* tickets;                  // [programs] zeros, which are left as zeros
  // With EXPERTS the tokens of y are pairs of a token and its expert. Tiles have pairs of one expert.
  const int* used_tiles;         // [1] number of tiles that have pairs
  const int* expert_of_tile;     // [used_tiles]
  const int* pair_of_tile;       // [used_tiles, tokens of a kernel's item], and -1 behind a tile's last pair
  unsigned numbers[8];           // the book in the served dtype, two values in each. Arguments need no load from memory.
  int tokens, outputs, inputs;   // tokens: not used with EXPERTS; outputs: of one expert
  unsigned inverse;              // with EXPERTS: 2^32 / pairs that read the same row of x, rounded up, or 0 for one pair
  int least_blocks;              // with EXPERTS: blocks that a program has at least
  int most_idle;                 // blocks that a program may lack on average so that no item is shared
  int blocks_a_group;            // blocks of 64 inputs that share a scale; 1 if SUB > 1
  int first_tile, rounded;       // for dequantize(): its first tile of 64 rows, and the dtype before quantization, as SCALE
};

DEVICE float to_float(unsigned short bits) { return IS_HALF ? half_to_float(bits) : bfloat_to_float(bits); }
DEVICE unsigned short to_number(float value) { return IS_HALF ? to_half(value) : to_bfloat(value); }

// Returns the first of the four inputs in a row of lane t in a step: see code_tiles.py.
DEVICE int first_input(int step, int t) { return SUB == 4 ? step * 16 + t * 4 : step / 2 * 32 + t * 8 + step % 2 * 4; }

// Returns one of several scales that lie in registers as they lie in memory.
DEVICE float scale_of(const unsigned* word, int index) {
  if (SCALE == 0) return __uint_as_float(word[index]);
  const unsigned short bits = word[index >> 1] >> (index & 1) * 16;
  return SCALE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
}

// Returns zero - 8 twice, from byte `index` of a word. The byte becomes the mantissa of 128 or of 1024, so all is exact.
DEVICE unsigned zero_pair(unsigned word, int index) {
  const unsigned byte = word >> index * 8 & 255;
  const unsigned pair = byte * 0x10001u + (IS_HALF ? 0x64006400u : 0x43004300u);
  return fma_pair(pair, IS_HALF ? 0x3C003C00u : 0x3F803F80u, IS_HALF ? 0xE408E408u : 0xC308C308u);
}

DEVICE unsigned minus_zero(unsigned pair, unsigned zero) {
  return fma_pair(zero, IS_HALF ? 0xBC00BC00u : 0xBF80BF80u, pair);
}

// Returns the row of y that belongs to a token of an item, or -1 if the item has fewer tokens. `tokens` are those of an item.
DEVICE int y_row(const Linear& p, int span, int tokens, int token) {
  const int at = span * tokens + token;
  if (EXPERTS) return __ldg(p.pair_of_tile + at);
  return at < p.tokens ? at : -1;
}

// Returns the row of x for a row of y, or -1 for -1.
DEVICE int x_row(const Linear& p, int row) {
  return EXPERTS && row >= 0 && p.inverse ? (int)__umulhi(row, p.inverse) : row;
}

// The rows and tokens of an item, both counted in items.
struct Item {
  int number, rows, span;
};

struct Run;

// The place of a block in a run: its number through all items, and its item and number there.
struct Place {
  int at, block;
  Item item;
  DEVICE void move(int count, const Run& run);
};

// A program's run of blocks. Blocks are counted through all items. Items that follow each other have the same rows and other
// tokens, so that codes are in the cache. With EXPERTS they have the same tokens, which are few, and other rows. Runs are
// cut between blocks, or between items if that divides them nearly as evenly, since adding the parts of an item takes time.
struct Run {
  int rows, spans;  // numbers of items along the rows and along the tokens
  int begin, end, blocks, total, programs;
  int unit, units;  // blocks that are not divided among programs: one, or those of an item; and their number
  DEVICE Run(const Linear& p, int rows, int spans) : rows(rows), spans(spans), blocks(p.inputs / 64) {
    total = rows * spans * blocks;
    programs = gridDim.x;
    if (EXPERTS) programs = min(programs, (total + p.least_blocks - 1) / p.least_blocks);
    const int items = rows * spans, most = items ? (items + programs - 1) / programs : 0;
    unit = (long long)most * blocks * programs - total <= (long long)p.most_idle * programs ? blocks : 1;
    units = unit == 1 ? total : items;
    begin = end = 0;
    if ((int)blockIdx.x < programs) begin = first_of(blockIdx.x), end = first_of(blockIdx.x + 1);
  }
  DEVICE bool is_empty() const { return begin == end; }
  // A division of 64 bits takes hundreds of instructions. 2^32 / MAX_PROGRAMS blocks are more than any launch has.
  DEVICE int first_of(int program) const { return (unsigned)program * (unsigned)units / (unsigned)programs * unit; }
  DEVICE int owner(int at) const { return ((unsigned)(at / unit + 1) * (unsigned)programs - 1) / (unsigned)units; }
  DEVICE int first_owner(int item) const { return owner(item * blocks); }
  DEVICE int last_owner(int item) const { return owner((item + 1) * blocks - 1); }
  DEVICE Item item(int number) const {
    return EXPERTS ? Item{number, number % rows, number / rows} : Item{number, number / spans, number % spans};
  }
  DEVICE void next(Item& item) const {
    item.number++;
    if (EXPERTS) {
      if (++item.rows == rows) item.rows = 0, item.span++;
    } else {
      if (++item.span == spans) item.span = 0, item.rows++;
    }
  }
  DEVICE int item_of(int at) const { return at / blocks; }
  DEVICE Place place(int at) const { return Place{at, at % blocks, item(item_of(at))}; }
  // Returns which part of a program's two an item is: 0 if the run begins in the item.
  DEVICE int part_of(int program, int item) const { return first_of(program) / blocks != item; }
  DEVICE bool has_whole(int item) const { return item * blocks >= begin && (item + 1) * blocks <= end; }
  // Returns the first item, or the last one if it is another, or -1 if the program does not share it.
  DEVICE int shared_item(int which) const {
    const int first = item_of(begin), item = which ? item_of(end - 1) : first;
    return (which && item == first) || has_whole(item) ? -1 : item;
  }
  // Returns the ticket of a shared item. A program shares at most one of the items that begin in its run: the last one.
  DEVICE int* ticket(const Linear& p, int item) const { return p.tickets + first_owner(item); }
  // Returns whether all other programs that share an item have written their parts. One thread calls it for an item, behind
  // a barrier and before one, so that its fences are the whole program's.
  DEVICE bool is_last(const Linear& p, int item) const {
    if (item < 0) return false;
    const int others = last_owner(item) - first_owner(item);
    __threadfence();
    const bool last = atomicAdd(ticket(p, item), 1) == others;
    if (last) *ticket(p, item) = 0;
    __threadfence();
    return last;
  }
};

DEVICE void Place::move(int count, const Run& run) {
  at += count;
  block += count;
  while (block >= run.blocks) {  // a division would take more instructions than all other addresses
    block -= run.blocks;
    run.next(item);
  }
}

// Finds the first of the groups of a block of 64 rows, through all of them. Rows have a whole number of groups, so the
// blocks before it do too.
struct Groups {
  int blocks;  // of a group
  float inverse;
  DEVICE Groups(const Linear& p) : blocks(p.blocks_a_group), inverse(1.f / p.blocks_a_group) {}
  DEVICE int first_of(int at) const {
    if (SUB > 1) return at * SUB;
    int group = (int)((float)at * inverse);  // off by one at most
    if (group * blocks > at) group--;
    if ((group + 1) * blocks <= at) group++;
    return group;
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The operands of 64 rows and a block of 64 inputs in shared memory: codes, behind them scales and zeros.
struct StagedTile {
  static constexpr int SCALES_AT = BLOCK_BYTES, ZEROS_AT = SCALES_AT + 64 * SUB * SCALE_BYTES;
  static constexpr int BYTES = ZEROS_AT + (ZEROS ? 64 * SUB : 0);

  // Begins to copy a block.
  static DEVICE void copy(unsigned char* to, const Linear& p, const Groups& groups, int block, Barrier* barrier) {
    const size_t group = (size_t)groups.first_of(block) * 64;
    expect_bytes(barrier, BYTES);
    copy_bytes(to, p.codes + (size_t)block * BLOCK_BYTES, BLOCK_BYTES, barrier);
    copy_bytes(to + SCALES_AT, p.scales + group * SCALE_BYTES, ZEROS_AT - SCALES_AT, barrier);
    if (ZEROS) copy_bytes(to + ZEROS_AT, p.zeros + group, BYTES - ZEROS_AT, barrier);
  }
};
#endif

// Writes the table of pairs. Whole warps call it: each lane has a value of the book, and reads the others' ones.
template <int THREADS> DEVICE void write_table(const Linear& p) {
  const int lane = threadIdx.x & 31;
  const unsigned own = p.numbers[lane >> 1 & 7] >> (lane & 1) * 16 & 0xFFFF;
#pragma unroll 8
  for (int i = threadIdx.x; i < 256 * 8; i += THREADS) {
    const int byte = i >> 3;
    store_entries(byte, i & 7, from_lane(own, byte & 15) | from_lane(own, byte >> 4) << 16);
  }
}

template <int THREADS> DEVICE unsigned fill_table(const Linear& p) {
  write_table<THREADS>(p);
  __syncthreads();
  return lane_part(threadIdx.x & 31);
}

DEVICE void store_sum(const Linear& p, int token, int row, float sum) {
  if (row >= p.outputs) return;
  if (p.bias) sum += to_float(p.bias[row]);
  p.y[(size_t)token * p.outputs + row] = to_number(sum);
}

#if !EXPERTS
// The sums of many() for an item in shared memory, and what becomes of them.
template <int ROWS, int TOKENS, int THREADS> struct Sums {
  static constexpr int PITCH = ROWS + 4;  // lanes that write sums of 8 rows and 4 tokens meet no bank twice
  static constexpr int SIZE = TOKENS * PITCH;
  static_assert(SIZE * 4 + 8 <= SUMS_BYTES, "the sums must fit");
  const Linear& p;
  const Run& run;
  float* sums;
  int* is_last;  // of the program's two parts

  DEVICE Sums(const Linear& p, const Run& run) : p(p), run(run), sums((float*)behind_table()), is_last((int*)(sums + SIZE)) {}

  // Writes, or adds, a warp's sums of MT tiles of 16 rows from `row` on, as the tensor cores leave them.
  template <bool ADDS, int MT, int NT> DEVICE void put(int row, float (*own)[NT][4]) const {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float* at = sums + (n * 8 + t * 2 + (i & 1)) * PITCH + row + m * 16 + g + (i >> 1) * 8;
          *at = ADDS ? *at + own[m][n][i] : own[m][n][i];
        }
  }

  DEVICE float* part(int program, int item) const {
    return p.parts + (size_t)(program * 2 + run.part_of(program, item)) * TOKENS * ROWS;
  }

  // Stores the item's sums if the program has all of it, or its part of them. All threads call it after put().
  DEVICE void store(const Item& item) const {
    const bool whole = run.has_whole(item.number);
    float* own_part = part(blockIdx.x, item.number);
    __syncthreads();
    for (int i = threadIdx.x; i < p.tokens * ROWS; i += THREADS) {
      const int token = i / ROWS, row = i % ROWS;
      const float sum = sums[token * PITCH + row];
      if (whole)
        store_sum(p, token, item.rows * ROWS + row, sum);
      else
        own_part[i] = sum;
    }
  }

  // Adds the parts of the items that this program is the last one to finish. Both of its items wait until here, so that
  // no copies or products wait for another program's memory.
  DEVICE void finish() const {
    if (run.shared_item(0) < 0 && run.shared_item(1) < 0) return;
    __syncthreads();
    if (threadIdx.x < 2) is_last[threadIdx.x] = run.is_last(p, run.shared_item(threadIdx.x));
    __syncthreads();
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      if (!is_last[which]) continue;
      const Item item = run.item(run.shared_item(which));
      const int first = run.first_owner(item.number), last = run.last_owner(item.number);
      for (int i = threadIdx.x; i < p.tokens * ROWS; i += THREADS) {
        // All programs but the first one begin in the item, or they would not share it.
        float sum = load_shared_by_programs(part(first, item.number) + i);
#pragma unroll 4
        for (int program = first + 1; program <= last; program++)
          sum += load_shared_by_programs(p.parts + (size_t)program * 2 * TOKENS * ROWS + i);
        store_sum(p, i / ROWS, item.rows * ROWS + i % ROWS, sum);
      }
    }
  }
};
#endif

// The rows of x that a lane reads in few(), and where its weight's blocks lie. It follows a warp from tile to tile.
template <int NT> struct Gathered {
  int span = -1;
  int shift = 0;  // from a block's number through all items to that in the weight
  int row[NT];    // of the lane's tokens, or -1

  DEVICE void follow(const Linear& p, const Run& run, int to, int lane) {
    if (span == to) return;
    span = to;
    if (EXPERTS) shift = (__ldg(p.expert_of_tile + span) - span) * run.rows * run.blocks;
#pragma unroll
    for (int n = 0; n < NT; n++) row[n] = x_row(p, y_row(p, span, NT * 8, n * 8 + (lane >> 2)));
  }
};

// The operands of a block in few(), in registers. A block is 64 rows by 64 inputs.
template <int NT> struct Operands {
  U4 code[4];                            // of a tile of 16 rows: byte 4 * step + register
  unsigned scale[SUB][2 * SCALE_BYTES];  // rows g and g + 8 of the four tiles of 16 rows
  U2 zero[SUB];                          // the same rows' zeros
  U2 x[NT][STEPS];

  DEVICE void load_weight(const Linear& p, const Groups& groups, int at, int lane) {
    const int g = lane >> 2;
#pragma unroll
    for (int m = 0; m < 4; m++) code[m] = load_once(p.codes + (size_t)at * BLOCK_BYTES + m * 512 + codes_of_lane(lane));
    const size_t group = (size_t)groups.first_of(at) * 64 + g * 8;
#pragma unroll
    for (int s = 0; s < SUB; s++) {
#pragma unroll
      for (int i = 0; i < SCALE_BYTES / 2; i++) {
        const U4 r = load_16(p.scales + (group + s * 64) * SCALE_BYTES + i * 16);
#pragma unroll
        for (int j = 0; j < 4; j++) scale[s][i * 4 + j] = r.v[j];
      }
      if (ZEROS) zero[s] = load_8(p.zeros + group + s * 64);
    }
  }

  DEVICE void load_x(const Linear& p, const Place& place, const Gathered<NT>& gathered, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int q = 0; q < STEPS; q++) x[n][q] = U2{{0, 0}};
      if (gathered.row[n] >= 0) {
        const unsigned short* from = p.x + (size_t)gathered.row[n] * p.inputs + place.block * 64 + t * (SUB == 4 ? 4 : 8);
        if (SUB == 4) {
#pragma unroll
          for (int q = 0; q < STEPS; q++) x[n][q] = load_x_8(from + q * 16);
        } else {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const U4 r = load_x_16(from + h * 32);
            x[n][h * 2] = U2{{r.v[0], r.v[1]}};
            x[n][h * 2 + 1] = U2{{r.v[2], r.v[3]}};
          }
        }
      }
    }
  }

  // Adds the block's products to the sums.
  DEVICE void multiply(float (*sums)[NT][4], unsigned lane) const {
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
      for (int s = 0; s < SUB; s++) {
        float c[NT][4] = {};
        const unsigned upper = ZEROS ? zero_pair(zero[s].v[0], m) : 0, lower = ZEROS ? zero_pair(zero[s].v[1], m) : 0;
#pragma unroll
        for (int q = s * (STEPS / SUB); q < (s + 1) * (STEPS / SUB); q++) {
          unsigned a[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            a[i] = operand(code[m], q, i, lane);
            if (ZEROS) a[i] = minus_zero(a[i], i & 1 ? lower : upper);
          }
#pragma unroll
          for (int n = 0; n < NT; n++) mma(c[n], a, x[n][q]);
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) sums[m][n][i] += scale_of(scale[s], (i >> 1) * 4 + m) * c[n][i];
      }
    }
  }
};

// The sums of a warp in few(): 64 rows and 8 * NT tokens, as the tensor cores leave them. In memory they lie by thread.
template <int NT> struct WarpSums {
  static constexpr int PIECES = 4 * NT, SIZE = PIECES * 32;  // a thread's and all, 4 sums each
  float v[4][NT][4];

  DEVICE void clear() {
#pragma unroll
    for (int k = 0; k < PIECES * 4; k++) v[k / 4 / NT][k / 4 % NT][k % 4] = 0.f;
  }
  DEVICE void write(F4* to, int lane) const {
#pragma unroll
    for (int k = 0; k < PIECES; k++) {
      const float* own = v[k / NT][k % NT];
      to[k * 32 + lane] = F4{{own[0], own[1], own[2], own[3]}};
    }
  }
  DEVICE void add(const F4* from, int lane, bool of_programs) {
#pragma unroll
    for (int k = 0; k < PIECES; k++) {
      const F4 r = of_programs ? load_shared_by_programs(from + k * 32 + lane) : from[k * 32 + lane];
#pragma unroll
      for (int i = 0; i < 4; i++) v[k / NT][k % NT][i] += r.v[i];
    }
  }
  DEVICE void store(const Linear& p, const Item& item, int lane) const {
    const int row = item.rows * 64 + (lane >> 2), t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int to = y_row(p, item.span, NT * 8, n * 8 + t * 2 + j);
        if (to < 0) continue;
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) store_sum(p, to, row + m * 16 + h * 8, v[m][n][h * 2 + j]);
      }
  }
};

// Up to 8 * NT tokens. An item is 64 rows. A program's run is cut into as many runs as it has warps, so that a warp keeps
// an item's sums in registers and stores those of whole items by itself. Only at the end of the program are the sums of
// items added that several warps share: the warp in which an item begins collects them. A warp loads the next block's
// operands into registers while it multiplies one: codes that went through shared memory would take a third of the
// bandwidth that lookups leave.
template <int NT, int WARPS> struct Few {
  using Sums = WarpSums<NT>;
  static constexpr int SIZE = Sums::SIZE;
  const Linear& p;
  const Run run;
  const Groups groups;
  const int lane, warp;

  DEVICE Few(const Linear& p)
      : p(p), run(p, p.outputs / 64, EXPERTS ? *p.used_tiles : 1), groups(p), lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {}

  // Returns the first block of a warp's run. It is rounded up, so that warp 0 has a block if the program has one.
  DEVICE int first_of(int warp) const { return run.begin + ((run.end - run.begin) * warp + WARPS - 1) / WARPS; }
  // Returns where a warp leaves its sums of an item that began before its run. Warp 0 has no such place.
  DEVICE F4* left(int warp) const { return (F4*)behind_table() + (warp - 1) * SIZE; }
  DEVICE int* is_last() const { return (int*)left(WARPS); }  // of the program's two shared items
  DEVICE F4* part(int program, int index) const { return (F4*)p.parts + (size_t)(program * 2 + index) * SIZE; }

  // Multiplies the warp's run. Returns the number of the item that the warp has to collect, or -1.
  DEVICE int multiply(Sums& sums) const {
    const int begin = first_of(warp), end = first_of(warp + 1);
    Operands<NT> now, next;
    Gathered<NT> gathered;
    Place place = run.place(begin);
    // The former kernel may still run. It writes x, and with EXPERTS what chooses the weight.
    if (!EXPERTS && begin < end) now.load_weight(p, groups, begin, lane);
    const unsigned lane_bits = fill_table<WARPS * 32>(p);
    wait_for_former();
    if (begin < end) {
      gathered.follow(p, run, place.item.span, lane);
      if (EXPERTS) now.load_weight(p, groups, begin + gathered.shift, lane);
      now.load_x(p, place, gathered, lane);
    }
#pragma unroll 1
    while (place.at < end) {
      const Item item = place.item;
      const int first = item.number * run.blocks, last = first + run.blocks, stop = min(last, end);
      sums.clear();
#pragma unroll 1
      while (place.at < stop) {
        place.move(1, run);
        if (place.at < end) {
          gathered.follow(p, run, place.item.span, lane);
          next.load_weight(p, groups, place.at + gathered.shift, lane);
          next.load_x(p, place, gathered, lane);
        }
        now.multiply(sums.v, lane_bits);
        now = next;
      }
      if (first >= begin && last <= end)
        sums.store(p, item, lane);
      else if (first < begin && warp > 0)
        sums.write(left(warp), lane);
      else if (first < begin && last <= end)
        sums.write(part(blockIdx.x, 0), lane);
      else
        return item.number;
    }
    return -1;
  }

  DEVICE void work() const {
    begin_next();
    if (run.is_empty()) {
      wait_for_former();  // or the next kernel could begin before the former one has ended
      return;
    }
    Sums sums;
    const int collected = multiply(sums);
    __syncthreads();
    if (collected >= 0) {
      const int stop = min((collected + 1) * run.blocks, run.end);
#pragma unroll 1
      for (int other = warp + 1; other < WARPS && first_of(other) < stop; other++)
        if (first_of(other) < first_of(other + 1)) sums.add(left(other), lane, false);
      if (run.has_whole(collected))
        sums.store(p, run.item(collected), lane);
      else
        sums.write(part(blockIdx.x, run.part_of(blockIdx.x, collected)), lane);
    }
    finish(sums);
  }

  // Adds the parts of the items that this program is the last one to finish. Both of its items wait until here, so that
  // no products wait for another program's memory.
  DEVICE void finish(Sums& sums) const {
    if (run.shared_item(0) < 0 && run.shared_item(1) < 0) return;
    __syncthreads();
    if (threadIdx.x < 2) is_last()[threadIdx.x] = run.is_last(p, run.shared_item(threadIdx.x));
    __syncthreads();
    if (warp >= 2 || !is_last()[warp]) return;
    const Item item = run.item(run.shared_item(warp));
    const int first = run.first_owner(item.number), last = run.last_owner(item.number);
    sums.clear();
    sums.add(part(first, run.part_of(first, item.number)), lane, true);
    // All programs but the first one begin in the item, or they would not share it.
#pragma unroll 1
    for (int program = first + 1; program <= last; program++) sums.add(part(program, 0), lane, true);
    sums.store(p, item, lane);
  }
};

#if !EXPERTS
// Returns where 16 bytes of x lie in a token's part of shared memory. Lanes read 16 bytes of four pieces in a row and
// two tokens at a time, so odd tokens have their halves swapped. With 8 bytes of four tokens, the pitch is enough.
DEVICE int x_place(int token, int piece) { return (SUB == 4 ? piece : piece ^ (token & 1) << 2) * 16; }

// Up to 8 * NT tokens. An item is 128 rows. At each step a program multiplies two blocks of 64 inputs, one by its even
// warps and one by its odd ones. A warp has two tiles of 16 rows. All warps share x, which lies in shared memory; codes and
// scales are copied there too, so that several steps are in flight, but each thread reads its own copies only.
template <int NT> struct Many {
  static constexpr int TOKENS = NT * 8, THREADS = MANY_WARPS * 32;
  static constexpr int X_BYTES = 2 * TOKENS * X_PITCH, CODE_BYTES = THREADS * 32;
  static constexpr int SCALES = 4 * SCALE_BYTES;  // bytes of a thread's scales of a group: two tiles, rows g and g + 8
  static constexpr int SCALES_AT = X_BYTES + CODE_BYTES, ZEROS_AT = SCALES_AT + THREADS * SUB * SCALES;
  static constexpr int BYTES = ZEROS_AT + (ZEROS ? THREADS * SUB * 8 : 0);
  static constexpr int FITTING = STAGE_BYTES / BYTES, STAGES = FITTING < 6 ? FITTING : 6;
  static_assert(STAGES >= 2, "the copies of two steps must fit");
  const Linear& p;
  const Run run;
  const Groups groups;
  const int lane, g, t, half, tile, rows;  // tile: first of the warp's two; rows: its tile of 64 rows in the item

  DEVICE Many(const Linear& p)
      : p(p), run(p, (p.outputs + MANY_ROWS - 1) / MANY_ROWS, 1), groups(p), lane(threadIdx.x & 31), g(lane >> 2), t(lane & 3),
        half(threadIdx.x >> 5 & 1), tile((threadIdx.x >> 6 & 1) * 2), rows(threadIdx.x >> 7) {}

  // Returns the number of blocks of the step that begins at a place.
  DEVICE int step_of(const Place& place) const { return min(2, min(run.blocks - place.block, run.end - place.at)); }
  DEVICE bool has_rows(int items) const { return items * 2 + rows < p.outputs / 64; }

  // Begins the copies of the step at a place and moves on to where the next one begins.
  DEVICE void copy(unsigned char* stage, Place& place) const {
    if (place.at < run.end) {
      const int count = step_of(place), tid = threadIdx.x;
#pragma unroll
      for (int i = tid; i < TOKENS * 16; i += THREADS) {
        const int token = i >> 4, piece = i & 15;  // a piece is 8 inputs
        if (piece >= count * 8) continue;
        const bool inside = token < p.tokens;
        const unsigned short* from = p.x + (size_t)(inside ? token : 0) * p.inputs + place.block * 64 + piece * 8;
        copy_to_shared<16>(stage + ((piece >> 3) * TOKENS + token) * X_PITCH + x_place(token, piece & 7), from, inside);
      }
      if (half < count && has_rows(place.item.rows)) {
        const int block = (place.item.rows * 2 + rows) * run.blocks + place.block + half;  // through all tiles of 64 rows
        const unsigned char* codes = p.codes + (size_t)block * BLOCK_BYTES + tile * 512 + codes_of_lane(lane);
        copy_to_shared<16>(stage + X_BYTES + tid * 16, codes);
        copy_to_shared<16>(stage + X_BYTES + (THREADS + tid) * 16, codes + 512);
        const size_t group = (size_t)groups.first_of(block) * 64 + g * 8;
#pragma unroll
        for (int s = 0; s < SUB; s++) {
#pragma unroll
          for (int h = 0; h < 2; h++)
            copy_to_shared<2 * SCALE_BYTES>(stage + SCALES_AT + (s * THREADS + tid) * SCALES + h * 2 * SCALE_BYTES,
                                            p.scales + (group + s * 64 + h * 4 + tile) * SCALE_BYTES);
          if (ZEROS) copy_to_shared<8>(stage + ZEROS_AT + (s * THREADS + tid) * 8, p.zeros + group + s * 64);
        }
      }
      place.move(count, run);
    }
    close_copies();
  }

  DEVICE void multiply(const unsigned char* stage, float (*sums)[NT][4], unsigned lane_bits) const {
    const int tid = threadIdx.x;
    const U4 code[2] = {*(const U4*)(stage + X_BYTES + tid * 16), *(const U4*)(stage + X_BYTES + (THREADS + tid) * 16)};
    const unsigned char* x = stage + (half * TOKENS + g) * X_PITCH;
    U4 b[NT];  // of two steps, or of one in the lower half
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      float c[2][NT][4] = {};
      unsigned zero[2][2] = {};
      if (ZEROS) {
        const U2 word = *(const U2*)(stage + ZEROS_AT + (s * THREADS + tid) * 8);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int m = 0; m < 2; m++) zero[m][h] = zero_pair(word.v[h] >> tile * 8, m);
      }
#pragma unroll
      for (int q = s * (STEPS / SUB); q < (s + 1) * (STEPS / SUB); q++) {
        unsigned a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            a[m][i] = operand(code[m], q, i, lane_bits);
            if (ZEROS) a[m][i] = minus_zero(a[m][i], zero[m][i & 1]);
          }
#pragma unroll
        for (int n = 0; n < NT; n++) {
          if (SUB == 4) {
            const U2 r = *(const U2*)(x + n * 8 * X_PITCH + q * 32 + t * 8);
            b[n] = U4{{r.v[0], r.v[1], 0, 0}};
          } else if (q % 2 == 0) {
            b[n] = *(const U4*)(x + n * 8 * X_PITCH + x_place(g, q * 2 + t));
          }
          const int upper = SUB == 4 ? 0 : q % 2 * 2;
          const U2 own = {{b[n].v[upper], b[n].v[upper + 1]}};
          mma(c[0][n], a[0], own);
          mma(c[1][n], a[1], own);
        }
      }
      unsigned scale[SCALE_BYTES];  // [h, m]
#pragma unroll
      for (int i = 0; i < SCALE_BYTES; i++) scale[i] = ((const unsigned*)(stage + SCALES_AT + (s * THREADS + tid) * SCALES))[i];
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) sums[m][n][i] += scale_of(scale, (i >> 1) * 2 + m) * c[m][n][i];
    }
  }

  DEVICE void work() const {
    const Sums<MANY_ROWS, TOKENS, THREADS> all_sums(p, run);
    const int row = rows * 64 + tile * 16;
    unsigned char* stages = behind_table() + SUMS_BYTES;
    Place place = run.place(run.begin), ahead = place;
    int fill = 0, use = 0;
    if (run.is_empty()) return;
    for (; fill < STAGES - 1; fill++) copy(stages + fill * BYTES, ahead);
    const unsigned lane_bits = fill_table<THREADS>(p);
    while (place.at < run.end) {
      const Item item = place.item;
      const int end = min((item.number + 1) * run.blocks, run.end);
      float sums[2][NT][4] = {};
      while (place.at < end) {
        const int count = step_of(place);
        wait_copies<STAGES - 2>();
        __syncthreads();
        copy(stages + fill * BYTES, ahead);
        if (half < count && has_rows(item.rows)) multiply(stages + use * BYTES, sums, lane_bits);
        fill = fill + 1 == STAGES ? 0 : fill + 1;
        use = use + 1 == STAGES ? 0 : use + 1;
        place.move(count, run);
      }
      if (half) all_sums.template put<false, 2, NT>(row, sums);
      __syncthreads();
      if (!half) all_sums.template put<true, 2, NT>(row, sums);
      all_sums.store(item);
    }
    all_sums.finish();
  }
};

#if FEW_32_WARPS
KERNEL void __launch_bounds__(FEW_32_WARPS * 32, 1) few_32(const Linear p) { Few<4, FEW_32_WARPS>(p).work(); }
#endif
KERNEL void __launch_bounds__(MANY_WARPS * 32, 1) many_32(const Linear p) { Many<4>(p).work(); }
KERNEL void __launch_bounds__(MANY_WARPS * 32, 1) many_64(const Linear p) { Many<8>(p).work(); }
#endif

KERNEL void __launch_bounds__(FEW_8_WARPS * 32, RESIDENT) few_8(const Linear p) { Few<1, FEW_8_WARPS>(p).work(); }
KERNEL void __launch_bounds__(FEW_16_WARPS * 32, RESIDENT) few_16(const Linear p) { Few<2, FEW_16_WARPS>(p).work(); }

// Rounds as NF4Weight and IntWeight do: to the dtype before quantization, then to the served one.
DEVICE unsigned short served(float value, int rounded) {
  if (rounded == 1) value = bfloat_to_float(to_bfloat(value));
  if (rounded == 2) value = half_to_float(to_half(value));
  return to_number(value);
}

// Writes the values of `outputs` rows from first_tile on to y, [outputs, D]. A warp writes a block.
KERNEL void __launch_bounds__(256) dequantize(const Linear p) {
  __shared__ float book[16];  // in 16 banks, so that lookups of a warp never conflict
  if (threadIdx.x < 16) book[threadIdx.x] = p.book[threadIdx.x];
  __syncthreads();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, blocks = p.inputs / 64;
  const int at = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (at >= p.outputs / 64 * blocks) return;
  const int tile_rows = at / blocks, block = at - tile_rows * blocks;
  const size_t from = (size_t)(p.first_tile + tile_rows);
  const unsigned char* codes = p.codes + (from * blocks + block) * BLOCK_BYTES + codes_of_lane(lane);
  const size_t group = (size_t)Groups(p).first_of((int)from * blocks + block) * 64 + g * 8;
#pragma unroll
  for (int m = 0; m < 4; m++) {
    const U4 code = load_once(codes + m * 512);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const size_t row = (size_t)(tile_rows * 64 + m * 16 + h * 8 + g) * p.inputs + block * 64;
      U4 out;  // of two products, whose inputs are eight side by side, or of one if groups have 16 inputs
#pragma unroll
      for (int q = 0; q < STEPS; q++) {
        const size_t its = group + q * SUB / STEPS * 64 + h * 4 + m;
        const unsigned short bits = SCALE == 0 ? 0 : ((const unsigned short*)p.scales)[its];
        const float scale = SCALE == 0 ? ((const float*)p.scales)[its] : SCALE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
        const float zero = ZEROS ? (float)p.zeros[its] - 8.f : 0.f;
#pragma unroll
        for (int k = 0; k < 2; k++) {  // bytes of inputs 0 and 1, 2 and 3 of the lane's four
          const unsigned byte = code.v[word_of(q, k * 2 + h)] >> byte_of(q, k * 2 + h) * 8 & 255;
          const unsigned low = served((book[byte & 15] - zero) * scale, p.rounded);
          const unsigned high = served((book[byte >> 4] - zero) * scale, p.rounded);
          out.v[q % 2 * 2 + k] = low | high << 16;
        }
        if (SUB == 4) {
          *(U2*)(p.y + row + first_input(q, t)) = U2{{out.v[q % 2 * 2], out.v[q % 2 * 2 + 1]}};
        } else if (q % 2 == 1) {
          *(U4*)(p.y + row + first_input(q - 1, t)) = out;
        }
      }
    }
  }
}
