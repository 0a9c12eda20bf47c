// How kernels read the codes of a tile of 64 rows and 64 inputs, whose order is that of kernels/quant/code_tiles.py.
#define BLOCK_BYTES 2048  // codes of 64 rows and 64 inputs
#define STEPS 4           // products of 16 inputs in a block

// Returns where a piece of a tile of 16 rows lies: 16 bytes of row n and n + 8, and of the l-th eight inputs of 32.
DEVICE int piece_at(int n, int l) { return ((n >> 1) * 8 + (l ^ n >> 1) * 2 + (n & 1)) * 16; }

// Returns where a lane's 16 bytes lie. They are its operands of all products, in an order of inputs in which the lane has eight
// inputs of x in a row, or four with groups of 16 inputs.
DEVICE int codes_of_lane(int lane) { return piece_at(lane >> 2, lane & 3); }

// Returns the word, and the byte in it, that name register `i` of the first operand in a step.
DEVICE int word_of(int step, int i) { return SUB == 4 ? (i >> 1) * 2 + (step >> 1) : (step & 1) * 2 + (i >> 1); }
DEVICE int byte_of(int step, int i) { return (SUB == 4 ? step & 1 : step >> 1) * 2 + (i & 1); }

// Returns the pair of values that is register `i` of the first operand in a step, from codes_of_lane().
DEVICE unsigned operand(const U4& code, int step, int i, unsigned lane_bits) {
  return lookup(code.v[word_of(step, i)], byte_of(step, i), lane_bits);
}
