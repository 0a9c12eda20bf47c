// Instructions that four_bit.cu needs and that C++ does not have. They are written in PTX, so that no header is needed.
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#if IS_HALF
#define NUMBER "f16"
#else
#define NUMBER "bf16"
#endif

struct __align__(8) U2 { unsigned v[2]; };
struct __align__(16) U4 { unsigned v[4]; };
struct __align__(16) F4 { float v[4]; };
struct __align__(64) MatrixMap { unsigned long long words[16]; };  // a matrix, as CUtensorMap describes it

// A table of 256 pairs lies at the start of shared memory, 32 times: 64 KB in all. The driver uses the first KB of the
// shared window. An entry's address is this constant, which is part of the load's instruction, and one byte permutation.
#define TABLE_AT 0x400u
#define TABLE_BYTES 0x10000u
#define BEHIND_TABLE (TABLE_AT + TABLE_BYTES)

extern __shared__ unsigned char shared_start[];

DEVICE unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// Returns the shared memory of a kernel that has no table.
DEVICE unsigned char* all_shared() { return shared_start; }

// Returns the shared memory behind the table.
DEVICE unsigned char* behind_table() { return shared_start + TABLE_BYTES; }

// Reads 16 bytes that are used once.
DEVICE U4 load_once(const void* at) {
  U4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(at));
  return r;
}

// Reads what no kernel writes while this one may run, such as weights.
DEVICE U4 load_16(const void* at) {
  U4 r;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(at));
  return r;
}

DEVICE U2 load_8(const void* at) {
  U2 r;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "l"(at));
  return r;
}

// Reads what the former kernel has written.
DEVICE U4 load_x_16(const void* at) {
  U4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(at) : "memory");
  return r;
}

DEVICE U2 load_x_8(const void* at) {
  U2 r;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "l"(at) : "memory");
  return r;
}

// Lets the next kernel of the stream begin as soon as there is room for it, if it is one that calls wait_for_former().
DEVICE void begin_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the former kernel of the stream has ended. Before it, a program may only read what no kernel writes.
DEVICE void wait_for_former() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Reads what another program of this launch has written, past the L1 cache.
DEVICE float load_shared_by_programs(const float* at) { return __ldcg(at); }
DEVICE F4 load_shared_by_programs(const F4* at) {
  F4 r;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(r.v[0]), "=f"(r.v[1]), "=f"(r.v[2]), "=f"(r.v[3]) : "l"(at));
  return r;
}

template <int BYTES> DEVICE void copy_to_shared(void* to, const void* from, bool inside = true) {
  const int bytes = inside ? BYTES : 0;  // the rest is filled with zeros
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
}

// Copies 16 bytes that other warps of this program copy too, through the L1 cache.
DEVICE void copy_cached_to_shared(void* to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most LEFT groups of this thread's copies are in flight.
template <int LEFT> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// Returns the number of another lane. All lanes of a warp call it.
DEVICE unsigned from_lane(unsigned own, int lane) { return __shfl_sync(~0u, own, lane); }

// Writes the pair of a byte for four lanes.
DEVICE void store_entries(unsigned byte, unsigned lanes, unsigned pair) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" :: "r"(TABLE_AT + byte * 256 + lanes * 16), "r"(pair) : "memory");
}

// Returns what lookup() needs of a lane. It stays behind the barrier after the table is written.
DEVICE unsigned lane_part(unsigned lane) {
  if (shared_address(shared_start) != TABLE_AT) __trap();
  unsigned r;
  // The compiler would compute a number that is moved again and again, from the thread's index.
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(r) : "r"(lane * 4), "r"(lane) : "memory");
  return r;
}

// Returns the pair of byte `index` of the word, from this lane's own bank: TABLE_AT + (byte << 8 | lane * 4).
DEVICE unsigned lookup(unsigned word, int index, unsigned lane) {
  unsigned r;
  asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(r) : "r"(__byte_perm(word, lane, 0x6504 | (index << 4))), "n"(TABLE_AT));
  return r;
}

// Adds A [16, 16] times B [16, 8] to C [16, 8].
DEVICE void mma(float* c, const unsigned* a, U2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." NUMBER "." NUMBER ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.v[0]), "r"(b.v[1]));
}

// Returns a * b + c for two numbers.
DEVICE unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
  unsigned r;
  asm("fma.rn." NUMBER "x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// Returns a number of the served dtype, twice.
DEVICE unsigned twice(float value) {
  unsigned r;
  asm("cvt.rn." NUMBER "x2.f32 %0, %1, %1;" : "=r"(r) : "f"(value));
  return r;
}

DEVICE float half_to_float(unsigned short bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

DEVICE float bfloat_to_float(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

DEVICE unsigned short to_half(float value) {
  unsigned short r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(value));
  return r;
}

DEVICE unsigned short to_bfloat(float value) {
  unsigned short r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(value));
  return r;
}
