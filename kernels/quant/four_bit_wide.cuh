// Instructions that four_bit_wide.cu and four_bit_dense.cu need and that only GPUs of compute capability 9.0 have.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
struct Barrier { unsigned long long state; };

DEVICE void begin_barrier(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

DEVICE void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

// Waits until the phase of this parity is complete.
DEVICE void wait_barrier(Barrier* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
      :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Makes new barriers visible to copies.
DEVICE void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Adds to the bytes that must be copied before the phase is complete.
DEVICE void expect_bytes(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Begins to copy bytes, a multiple of 16, from global to shared memory.
DEVICE void copy_bytes(void* to, const void* from, int bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Fetches the description of a matrix, which the first copy would wait for.
DEVICE void fetch_map(const MatrixMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// Begins to copy 64 columns of a matrix, and as many rows as its map says, from a place of it. Numbers outside the matrix are
// zeros. A row of 128 bytes has its pieces of 16 bytes exchanged, by the last three bits of its number.
DEVICE void copy_matrix(void* to, const MatrixMap* map, int column, int row, Barrier* barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// Waits for the first COUNT threads of the program.
template <int COUNT> DEVICE void wait_threads() { asm volatile("bar.sync 1, %0;" :: "n"(COUNT) : "memory"); }

template <int COUNT, bool MORE> DEVICE void take_registers() {
  if (MORE)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// Makes this thread's writes to shared memory visible to wgmma.
DEVICE void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Adds 1 to a ticket. Whoever sees it sees all that this warp has written before __syncwarp().
DEVICE void count_ticket(int* at) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(at) : "memory"); }

DEVICE int load_ticket(const int* at) {
  int r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
  return r;
}

// Transposes a matrix of 8 by 8 numbers, of which lane 4 * i + j has those of row i and columns 2 * j and 2 * j + 1.
DEVICE unsigned transpose(unsigned pair) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

DEVICE void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT groups of products are in flight. C is what the finished ones have written.
template <int LEFT, int NT> DEVICE void wait_wgmma(float (&c)[NT][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i]) :: "memory");
}

// Waits until at most LEFT groups of products are in flight, of which no sums are read before finish_wgmma().
template <int LEFT> DEVICE void wait_wgmma() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

// Waits for all products. C is what they have written.
template <int TILES, int NT> DEVICE void finish_wgmma(float (&c)[TILES][NT][4]) {
#pragma unroll
  for (int i = 0; i < TILES; i++) wait_wgmma<0>(c[i]);
}

#define C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define A_B_ADDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds)

// Adds A [64, 16] in registers times B [16, N] in shared memory to C [64, N], or writes it to C.
template <int N> struct Wgmma;
template <> struct Wgmma<32> {
  static DEVICE void run(float (*c)[4], const unsigned* a, unsigned long long b, bool adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." NUMBER "." NUMBER " "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, adds, 1, 1, 0;\n}"
                 : C4(0), C4(1), C4(2), C4(3) : A_B_ADDS);
  }
};
template <> struct Wgmma<64> {
  static DEVICE void run(float (*c)[4], const unsigned* a, unsigned long long b, bool adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." NUMBER "." NUMBER " "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
                 "%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, adds, 1, 1, 0;\n}"
                 : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7) : A_B_ADDS);
  }
};
template <> struct Wgmma<128> {
  static DEVICE void run(float (*c)[4], const unsigned* a, unsigned long long b, bool adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." NUMBER "." NUMBER " "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
                 "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
                 "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, adds, 1, 1, 0;\n}"
                 : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7),
                   C4(8), C4(9), C4(10), C4(11), C4(12), C4(13), C4(14), C4(15)
                 : A_B_ADDS);
  }
};
#endif
