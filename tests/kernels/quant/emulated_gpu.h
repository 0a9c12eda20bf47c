// Runs four_bit.cu, or few_tokens_codes.cu, on a CPU. One thread of the host takes turns at the threads of all programs:
// each runs until it waits for others, and then any that waits no more goes on, in an order that is random and the same in
// each run. So a missing barrier is noticed. It has the primitives of four_bit_primitives.cuh, with the register layouts
// of PTX's mma.m16n8k16. Asynchronous copies happen as late as they may, so that a missing wait is noticed.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>
#include <ucontext.h>

using std::max;
using std::min;

#define DEVICE inline
#define KERNEL extern "C"
#define __launch_bounds__(...)
#define __shared__ static
#define __grid_constant__

struct alignas(8) U2 { unsigned v[2]; };
struct alignas(16) U4 { unsigned v[4]; };
struct alignas(16) F4 { float v[4]; };
// A matrix for the copy engine, as matrix_map() of the tests describes it: numbers of 16 bits, in rows.
struct alignas(64) MatrixMap { const unsigned short* at; long long columns, rows, copied_rows; long long rest[12]; };
struct Index { int x; };

struct Program;
struct Thread {
  ucontext_t context;
  Program* program;
  Index thread, block;
  std::deque<std::vector<std::function<void()>>> copies;
  std::vector<std::function<void()>> open_copies;
  std::deque<std::vector<struct Product>> products;
  std::vector<struct Product> open_products;
};
inline Thread* current;
inline ucontext_t host;
inline std::vector<Thread*> ready, watching;  // those that can go on, and those that wait for memory to change
inline unsigned order;
inline int running;  // threads that have not ended
inline long watches;  // how often a loop has waited for memory, in one launch
inline bool is_stuck;
constexpr long MOST_WATCHES = 1'000'000;
#define threadIdx (current->thread)
#define blockIdx (current->block)

inline void look_again() {
  ready.insert(ready.end(), watching.begin(), watching.end());
  watching.clear();
}
// Another thread goes on, and this one when it is among the ready ones.
inline void give_way() {
  Thread* self = current;
  if (ready.empty()) look_again();
  is_stuck = ready.empty();  // all wait for each other
  if (is_stuck) setcontext(&host);
  order = order * 1664525 + 1013904223;
  std::swap(ready[(order >> 8) % ready.size()], ready.back());
  current = ready.back();
  ready.pop_back();
  if (current != self) swapcontext(&self->context, &current->context);
}
// For loops that wait until memory has a value.
inline void watch() {
  is_stuck = ++watches > MOST_WATCHES;  // what they wait for does not come
  if (is_stuck) setcontext(&host);
  watching.push_back(current);
  give_way();
}
struct Rendezvous {
  int expected;
  std::vector<Thread*> waiting;
  Rendezvous(int expected) : expected(expected) {}
  void open_if_all_are_here() {
    if ((int)waiting.size() < expected) return;
    ready.insert(ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
  }
  void arrive_and_wait() {
    waiting.push_back(current);
    open_if_all_are_here();
    give_way();
  }
  void arrive_and_drop() {
    expected--;
    open_if_all_are_here();
  }
};

constexpr unsigned TABLE_AT = 1024, BEHIND_TABLE = TABLE_AT + 0x10000, WINDOW = 228 * 1024, DRIVER = 1024;
struct Warp {
  Rendezvous barrier{32};
  unsigned a[32][4], b[32][2];
};
struct Program {
  std::vector<unsigned char> window = std::vector<unsigned char>(WINDOW, 0xFF);  // numbers that nobody has written are NaN
  Rendezvous barrier;
  std::vector<Warp> warps;
  std::map<int, Rendezvous> teams, parts;  // of warps, and of the first threads
  Program(int num_threads) : barrier(num_threads), warps(num_threads / 32) {}
};
inline Index gridDim;

inline unsigned char* at_window(unsigned address, unsigned size) {
  if (address < DRIVER || address + size > WINDOW) abort();
  return current->program->window.data() + address;
}
inline void __syncthreads() { current->program->barrier.arrive_and_wait(); }
inline void __syncwarp() { current->program->warps[threadIdx.x >> 5].barrier.arrive_and_wait(); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline int atomicAdd(int* at, int value) { return __sync_fetch_and_add(at, value); }
inline int __ldg(const int* at) { return *at; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)(bytes >> (selector >> i * 4 & 7) * 8 & 255) << i * 8;
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline float __uint_as_float(unsigned bits) { float r; memcpy(&r, &bits, 4); return r; }

inline unsigned char* all_shared() { return at_window(DRIVER, 0); }
inline unsigned char* behind_table() { return at_window(BEHIND_TABLE, 0); }
template <class T> T read(const void* at) {
  if ((size_t)at % sizeof(T)) abort();
  T r; memcpy(&r, at, sizeof(T)); return r;
}
inline U4 load_once(const void* at) { return read<U4>(at); }
inline U4 load_16(const void* at) { return read<U4>(at); }
inline U2 load_8(const void* at) { return read<U2>(at); }
inline U4 load_x_16(const void* at) { return read<U4>(at); }
inline U2 load_x_8(const void* at) { return read<U2>(at); }
inline void begin_next() {}
inline void wait_for_former() {}
inline float load_shared_by_programs(const float* at) { return *at; }

template <int BYTES> void copy_to_shared(void* to, const void* from, bool inside = true) {
  const size_t offset = (unsigned char*)to - current->program->window.data();
  if ((size_t)from % BYTES || offset % BYTES || offset < DRIVER || offset + BYTES > WINDOW) abort();
  current->open_copies.push_back([=] { if (inside) memcpy(to, from, BYTES); else memset(to, 0, BYTES); });
}
inline void copy_cached_to_shared(void* to, const void* from, bool inside) { copy_to_shared<16>(to, from, inside); }
inline void close_copies() {
  current->copies.push_back(std::move(current->open_copies));
  current->open_copies.clear();
}
template <int LEFT> void wait_copies() {
  auto& copies = current->copies;
  for (; copies.size() > LEFT; copies.pop_front()) for (auto& copy : copies.front()) copy();
}

inline unsigned from_lane(unsigned own, int from) {
  Warp& warp = current->program->warps[threadIdx.x >> 5];
  warp.a[threadIdx.x & 31][0] = own;
  warp.barrier.arrive_and_wait();
  const unsigned r = warp.a[from][0];
  warp.barrier.arrive_and_wait();
  return r;
}
inline void store_entries(unsigned byte, unsigned lanes, unsigned pair) {
  for (int i = 0; i < 4; i++) memcpy(at_window(TABLE_AT + byte * 256 + lanes * 16 + i * 4, 4), &pair, 4);
}
inline unsigned lane_part(unsigned lane) { return lane; }
inline unsigned lookup(unsigned word, int index, unsigned lane) {
  return read<unsigned>(at_window(TABLE_AT + (word >> index * 8 & 255) * 256 + lane * 4, 4));
}

inline float half_to_float(unsigned short bits) { _Float16 r; memcpy(&r, &bits, 2); return (float)r; }
inline float bfloat_to_float(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
inline unsigned short to_half(float value) { _Float16 h = (_Float16)value; unsigned short r; memcpy(&r, &h, 2); return r; }
inline unsigned short to_bfloat(float value) {
  unsigned bits; memcpy(&bits, &value, 4);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float number_at(unsigned pair, int index) {
  const unsigned short bits = pair >> index * 16;
  return IS_HALF ? half_to_float(bits) : bfloat_to_float(bits);
}
inline unsigned twice(float value) { return (IS_HALF ? to_half(value) : to_bfloat(value)) * 0x10001u; }
inline unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
  unsigned r = 0;
  for (int i = 0; i < 2; i++) {
    const float value = std::fma(number_at(a, i), number_at(b, i), number_at(c, i));
    r |= (unsigned)(IS_HALF ? to_half(value) : to_bfloat(value)) << i * 16;
  }
  return r;
}

inline void mma(float* c, const unsigned* a, U2 b) {
  Warp& warp = current->program->warps[threadIdx.x >> 5];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  memcpy(warp.a[lane], a, 16);
  memcpy(warp.b[lane], b.v, 8);
  warp.barrier.arrive_and_wait();
  for (int i = 0; i < 4; i++) {
    const int row = g + (i >> 1) * 8, column = t * 2 + (i & 1);
    for (int k = 0; k < 16; k++) {
      const int upper = k >> 3, at = k & 7;
      const unsigned left = warp.a[(row & 7) * 4 + (at >> 1)][upper * 2 + (row >> 3)];
      c[i] += number_at(left, at & 1) * number_at(warp.b[column * 4 + (at >> 1)][upper], at & 1);
    }
  }
  warp.barrier.arrive_and_wait();
}

// What GPUs of compute capability 9.0 have. Products of wgmma happen as late as they may, too.
#define __CUDA_ARCH_FEAT_SM90_ALL
struct Barrier { int count, arrived, phases; };
struct Product {
  float (*c)[4];
  const unsigned* a;
  unsigned long long b;
  bool adds;
  int tokens;
};

inline void begin_barrier(Barrier* barrier, int arrivals) { *barrier = {arrivals, 0, 0}; }
inline void arrive(Barrier* barrier) {
  if (++barrier->arrived < barrier->count) return;
  barrier->arrived = 0;
  barrier->phases++;
  look_again();
}
inline void wait_barrier(Barrier* barrier, int parity) {
  while ((barrier->phases & 1) == parity) watch();
}
inline void show_barriers() {}
inline void expect_bytes(Barrier*, int) {}
inline void copy_bytes(void* to, const void* from, int bytes, Barrier*) {
  if ((size_t)from % 16 || ((unsigned char*)to - current->program->window.data()) % 16 || bytes % 16) abort();
  memcpy(to, from, bytes);
}
template <int COUNT> void wait_threads() { current->program->parts.try_emplace(COUNT, COUNT).first->second.arrive_and_wait(); }
inline void fetch_map(const MatrixMap*) {}
inline void copy_matrix(void* to, const MatrixMap* map, int column, int row, Barrier*) {
  const size_t offset = (unsigned char*)to - current->program->window.data();
  if (offset % 1024 || offset + map->copied_rows * 128 > WINDOW || column % 64) abort();
  for (int i = 0; i < map->copied_rows; i++)
    for (int k = 0; k < 64; k++) {
      const bool inside = row + i < map->rows && column + k < map->columns;
      const unsigned short number = inside ? map->at[(row + i) * map->columns + column + k] : 0;
      memcpy((unsigned char*)to + ((i * 128 + k * 2) ^ (i & 7) << 4), &number, 2);
    }
}
template <int COUNT, bool MORE> void take_registers() {}
inline void count_ticket(int* at) { ++*at; }
inline int load_ticket(const int* at) { watch(); return *at; }
inline void show_to_wgmma() {}
inline F4 load_shared_by_programs(const F4* at) { return read<F4>(at); }

inline unsigned transpose(unsigned pair) {
  Warp& warp = current->program->warps[threadIdx.x >> 5];
  const int lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
  warp.a[lane][0] = pair;
  warp.barrier.arrive_and_wait();
  const auto at = [&](int i, int j) { return warp.a[i * 4 + j / 2][0] >> j % 2 * 16 & 0xFFFF; };
  const unsigned r = at(column, row) | at(column + 1, row) << 16;
  warp.barrier.arrive_and_wait();
  return r;
}

template <int N> struct Wgmma {
  static void run(float (*c)[4], const unsigned* a, unsigned long long b, bool adds) {
    current->open_products.push_back({c, a, b, adds, N});
  }
};
inline void begin_wgmma() {}
inline void close_wgmma() {
  current->products.push_back(std::move(current->open_products));
  current->open_products.clear();
}

inline void multiply(const Product& product) {
  Warp& warp = current->program->warps[threadIdx.x >> 5];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  memcpy(warp.a[lane], product.a, 16);
  warp.barrier.arrive_and_wait();
  const unsigned start = (product.b & 0x3FFF) * 16, inputs = (product.b >> 16 & 0x3FFF) * 16, tokens = (product.b >> 32 & 0x3FFF) * 16;
  const bool swizzled = product.b >> 62 == 1;
  for (int n = 0; n < product.tokens / 8; n++)
    for (int i = 0; i < 4; i++) {
      const int row = g + (i >> 1) * 8, column = t * 2 + (i & 1);
      float& sum = product.c[n][i];
      if (!product.adds) sum = 0.f;
      for (int k = 0; k < 16; k++) {
        const int upper = k >> 3, at = k & 7;
        const unsigned left = warp.a[(row & 7) * 4 + (at >> 1)][upper * 2 + (row >> 3)];
        unsigned from = start + upper * (swizzled ? 16 : inputs) + n * tokens + column * (swizzled ? 128 : 16) + at / 2 * 4;
        if (swizzled) from ^= from >> 3 & 0x70;
        const unsigned right = read<unsigned>(at_window(from, 4));
        sum += number_at(left, at & 1) * number_at(right, at & 1);
      }
    }
  warp.barrier.arrive_and_wait();
}
template <int LEFT, int NT> void wait_wgmma(float (&)[NT][4]) {
  auto& products = current->products;
  for (; products.size() > LEFT; products.pop_front()) for (const Product& product : products.front()) multiply(product);
}

template <int LEFT> void wait_wgmma() {
  float none[1][4];
  wait_wgmma<LEFT>(none);
}
template <int TILES, int NT> void finish_wgmma(float (&c)[TILES][NT][4]) { wait_wgmma<0>(c[0]); }

constexpr size_t STACK_BYTES = 128 << 10;  // of a thread; the system gives only what is touched

// Returns false where threads wait for ever.
template <class Arguments> bool launch(void (*kernel)(Arguments), int num_programs, int num_threads, const Arguments* arguments) {
  static std::function<void()> run;
  static void (*const begin)() = [] { run(); };
  run = [=] {
    kernel(*arguments);
    current->program->barrier.arrive_and_drop();
    if (--running == 0) setcontext(&host);
    give_way();
  };
  gridDim.x = num_programs;
  std::vector<std::unique_ptr<Program>> programs;
  std::vector<Thread> threads(num_programs * num_threads);
  const std::unique_ptr<char[]> stacks(new char[threads.size() * STACK_BYTES]);
  for (int i = 0; i < (int)threads.size(); i++) {
    Thread& thread = threads[i];
    if (i % num_threads == 0) programs.push_back(std::make_unique<Program>(num_threads));
    thread.program = programs.back().get();
    thread.thread.x = i % num_threads;
    thread.block.x = i / num_threads;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = &stacks[i * STACK_BYTES];
    thread.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread.context, begin, 0);
    ready.push_back(&thread);
  }
  running = threads.size();
  watches = 0;
  current = ready.back();
  ready.pop_back();
  swapcontext(&host, &current->context);
  if (is_stuck) ready.clear(), watching.clear();
  return !is_stuck;
}

#ifdef OPERANDS_SOURCE
template <int TEAM> void wait_team(int team) {
  current->program->teams.try_emplace(team, TEAM * 32).first->second.arrive_and_wait();
}

#include CODE_TILES
#include OPERANDS_SOURCE
#include FEW_TOKENS_SOURCE

extern "C" bool emulate(int kernel, int programs, const FewTokens* arguments) {
  using Kernel = void (*)(FewTokens);
  const Kernel kernels[] = {inner_one, inner, outer_one, outer};
  return launch<FewTokens>(kernels[kernel], programs, THREADS, arguments);
}
#else
#include CODE_TILES
#include FOUR_BIT_SOURCE
#include WIDE_SOURCE
#include DENSE_SOURCE

extern "C" int bytes_of_arguments() { return sizeof(Linear); }

extern "C" bool emulate(int kernel, int programs, const Linear* arguments) {
  using Kernel = void (*)(Linear);
  // In the order of KERNEL_SHAPES, with as many warps.
#if EXPERTS
  const Kernel kernels[] = {few_8, few_16, {}, {}, {}, {}, {}, wide_32, wide_64, wide_128, {}, {}, {}, dequantize};
#else
#if FEW_32_WARPS
  const Kernel few_of_32 = few_32;
#else
  const Kernel few_of_32 = nullptr;
#endif
  const Kernel kernels[] = {few_8, few_16, dense_32, dense_64, narrow_64, dense_128, narrow_128, {}, {}, {}, few_of_32, many_32, many_64, dequantize};
#endif
  const int warps[] = {FEW_8_WARPS, FEW_16_WARPS, 20, 20, 12, 12, 12, 12, 12, 12, FEW_32_WARPS, MANY_WARPS, MANY_WARPS, 8};
  alignas(64) char aligned[sizeof(Linear)];
  memcpy(aligned, arguments, sizeof(Linear));
  return launch<Linear>(kernels[kernel], programs, warps[kernel] * 32, (const Linear*)aligned);
}
#endif
