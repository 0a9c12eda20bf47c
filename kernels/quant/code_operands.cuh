// Products of codes and the x of at most 8 tokens, from registers, for a kernel that is limited by the codes' bytes.
// kernels/moe/few_tokens_codes.cu comes behind this file, and four_bit_primitives.cuh and code_tiles.cuh before it.
//
// Idea: the warps of a team share 16 outputs. Each multiplies some blocks of 64 inputs, and the team adds the sums in shared
// memory. So results never depend on timing. Codes become the tensor cores' first operand in registers: four bits by a table
// of pairs (four_bit.cu), e4m3 by moving its bits into a longer number, which is exact.
// Codes, scales and x of the blocks ahead are in flight to shared memory. They are not loaded into registers, since the
// compiler lets all such loads share a counter: then the first block's data would be waited for until the last one's are there.
//
// The compiler is given IS_HALF, BITS, SCALE, SUB, ZEROS and WARPS, as few_tokens_codes.cu says.
#define THREADS (WARPS * 32)
#define ROWS 16       // outputs of a team's item
#define PITCH 20      // floats of a token's sums: lanes that write sums of 8 rows and 4 tokens meet no bank twice
#define COLUMNS 8     // tokens of an item
#define WORDS (BITS == 8 ? 2 : 1)  // loads of 16 bytes that are a lane's codes of 16 rows and 64 inputs

// The weights of one linear, or those of all experts, one after the other.
struct Matrix {
  const unsigned char* codes;
  const unsigned char* scales;
  const unsigned char* zeros;
  int inputs, groups;  // groups of a row
  unsigned inverse;    // 2^32 / blocks of 64 inputs that share a scale, rounded up, or 0 if none share one
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
  constexpr int COUNT = (256 * 8 + THREADS - 1) / THREADS;
  unsigned pair[COUNT];
#pragma unroll
  for (int k = 0; k < COUNT; k++) pair[k] = pairs[min(k * THREADS + (int)threadIdx.x, 256 * 8 - 1) >> 3];
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const int i = k * THREADS + threadIdx.x;
    if (i < 256 * 8) store_entries(i >> 3, i & 7, pair[k]);
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

// Where a lane's codes, scales and x of an item lie: some parts of 16 rows of a matrix, and one row of x.
template <int PARTS> struct Source {
  const unsigned char* code[PARTS];
  size_t number[PARTS];  // of the scale and the zero of row g in the first group
  const unsigned char *scales, *zeros;
  const unsigned short* x;  // null for a column that is not used
  size_t half;              // from the codes of row g to those of row g + 8
  int half_numbers;
  unsigned inverse;

  // The first part's rows begin at `row`, and those of a second part `apart` later.
  DEVICE int group_of(int block) const { return SUB > 1 ? block * SUB : inverse ? (int)__umulhi(block, inverse) : block; }

  DEVICE Source(const Matrix& m, size_t row, int apart, const unsigned short* x_row, int lane)
      : scales(m.scales), zeros(m.zeros), inverse(m.inverse) {
    const int g = lane >> 2, t = lane & 3, blocks = m.inputs >> 6;
    half = (size_t)m.inputs * 8;
    half_numbers = BITS == 8 ? m.groups * 8 : 4;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const size_t first = row + part * (size_t)apart;
      if (BITS == 8) {
        code[part] = m.codes + (first + g) * m.inputs + t * 16;
        number[part] = (first + g) * m.groups;
      } else {
        const size_t tile = first / 64, quarter = first / 16 % 4;
        code[part] = m.codes + tile * blocks * 2048 + quarter * 512 + codes_of_lane(lane);
        number[part] = (tile * m.groups * 8 + g) * 8 + quarter;
      }
    }
    x = x_row ? x_row + (SUB == 4 ? t * 4 : BITS == 8 ? t * 16 : t * 8) : x_row;
  }
};

// The blocks of an item that a warp of a team multiplies. They are neighbors, whose scales are read together, or the team's
// warps read neighboring blocks at a time, so that they ask memory for more than 64 bytes of a row.
struct Share {
  int first, count, stride;
  DEVICE Share(int inputs, int member, int team, bool alternates) {
    const int blocks = inputs >> 6;
    first = alternates ? member : blocks * member / team;
    count = alternates ? (blocks - member + team - 1) / team : blocks * (member + 1) / team - first;
    stride = alternates ? team : 1;
  }
  DEVICE int block(int step) const { return first + step * stride; }
};

// Whether a warp's block begins a group of inputs, so that it needs other scales than the block before.
template <int PARTS> DEVICE bool begins_group(const Source<PARTS>& from, const Share& share, int step) {
  return step == 0 || from.group_of(share.block(step)) != from.group_of(share.block(step - 1));
}

// The weights of an item's rows and a block of 64 inputs, and x, on their way through shared memory. Each lane reads what it
// has copied itself, so no lane waits for another one.
template <int PARTS> struct Operands {
  float scale[PARTS][2][SUB];  // of rows g and g + 8 in the last block that was multiplied
  unsigned zero[PARTS][2][SUB];

  static constexpr int SCALE_COPIES = PARTS * 2 * SUB;
  static constexpr int X_AT = PARTS * WORDS * 512, SCALES_AT = X_AT + 1024, ZEROS_AT = SCALES_AT + SCALE_COPIES * 128;
  static constexpr int BYTES = ZEROS_AT + (ZEROS ? SCALE_COPIES * 128 : 0);  // of a block

  // Copies a block's codes, and the scales and zeros of its groups if a lane does not have them from the block before. Numbers
  // of 8 or 16 bits come with their neighbors in 4 bytes.
  static DEVICE void copy_weights(unsigned char* to, const Source<PARTS>& from, int block, bool begins, int lane) {
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int h = 0; h < WORDS; h++)
        copy_to_shared<16>(to + (part * WORDS + h) * 512 + lane * 16,
                           from.code[part] + h * from.half + (size_t)block * (BITS == 8 ? 64 : 2048));
    if (!begins) return;
    const int group = from.group_of(block);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int s = 0; s < SUB; s++) {
          const size_t at = from.number[part] + h * from.half_numbers + (size_t)(group + s) * (BITS == 8 ? 1 : 64);
          const int copy = ((part * 2 + h) * SUB + s) * 128 + lane * 4;
          copy_to_shared<4>(to + SCALES_AT + copy, from.scales + (SCALE == 0 ? at * 4 : at * 2 / 4 * 4));
          if (ZEROS) copy_to_shared<4>(to + ZEROS_AT + copy, from.zeros + at / 4 * 4);
        }
    }
  }

  static DEVICE void copy_x(unsigned char* to, const Source<PARTS>& from, const unsigned short* any, int block, int lane) {
    const unsigned short* x = from.x ? from.x + block * 64 : any;
    if (SUB == 4) {
#pragma unroll
      for (int q = 0; q < STEPS; q++) copy_to_shared<8>(to + X_AT + q * 256 + lane * 8, x + q * 16, from.x);
    } else {
#pragma unroll
      for (int q = 0; q < 2; q++) copy_cached_to_shared(to + X_AT + q * 512 + lane * 16, x + q * (BITS == 8 ? 8 : 32), from.x);
    }
  }

  DEVICE void read_scales(const unsigned char* at, const Source<PARTS>& from, int lane) {
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int s = 0; s < SUB; s++) {
          const int copy = ((part * 2 + h) * SUB + s) * 128 + lane * 4;
          const unsigned word = *(const unsigned*)(at + SCALES_AT + copy);
          const unsigned short bits = word >> (from.number[part] & 1) * 16;
          scale[part][h][s] = SCALE == 0 ? __uint_as_float(word) : SCALE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
          if (ZEROS) zero[part][h][s] = *(const unsigned*)(at + ZEROS_AT + copy) >> (from.number[part] & 3) * 8 & 255;
        }
  }

  // Adds the products of a block, whose copies have ended, to the sums.
  DEVICE void multiply(const unsigned char* at, const Source<PARTS>& from, bool begins, float (*sums)[4], int lane, unsigned table) {
    if (begins) read_scales(at, from, lane);
    U2 x[STEPS];
#pragma unroll
    for (int q = 0; q < STEPS; q++) {
      if (SUB == 4) {
        x[q] = *(const U2*)(at + X_AT + q * 256 + lane * 8);
      } else if (q % 2 == 0) {
        const U4 r = *(const U4*)(at + X_AT + q * 256 + lane * 16);
        x[q] = U2{{r.v[0], r.v[1]}};
        x[q + 1] = U2{{r.v[2], r.v[3]}};
      }
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      U4 code[WORDS];
#pragma unroll
      for (int h = 0; h < WORDS; h++) code[h] = *(const U4*)(at + (part * WORDS + h) * 512 + lane * 16);
#pragma unroll
      for (int s = 0; s < SUB; s++) {
        float c[4] = {};
#pragma unroll
        for (int q = s * (STEPS / SUB); q < (s + 1) * (STEPS / SUB); q++) {
          unsigned a[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
#if BITS == 8
            a[i] = e4m3_pair(code[i & 1].v[q], i >> 1);
#else
            a[i] = operand(code[0], q, i, table);
            if (ZEROS) a[i] = less_zero(a[i], zero[part][i & 1][s]);
#endif
          }
          mma(c, a, x[q]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[part][i] += scale[part][i >> 1][s] * c[i];
      }
    }
  }
};

// Writes a warp's sums of 16 outputs to shared memory [PARTS, COLUMNS, PITCH], as the tensor cores leave them.
template <int PARTS> DEVICE void put_sums(float* to, float (*sums)[4], int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int part = 0; part < PARTS; part++)
#pragma unroll
    for (int i = 0; i < 4; i++) to[(part * COLUMNS + t * 2 + (i & 1)) * PITCH + g + (i >> 1) * 8] = sums[part][i];
}
