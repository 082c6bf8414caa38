// Runs the kernels' sources on the CPU, for tests without a GPU: compiled as C++, a block's threads are fibers of one
// thread of the system, taken in an order that a seed decides. Barriers and shuffles switch fibers, so a value that is
// read before the barrier that should come first is, in some orders, not there yet.

#pragma once
#define PLUGFOLD_HOST 1
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t i32;
typedef int64_t i64;
typedef unsigned long long u64;

struct Dim {
  u32 x, y, z;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

namespace host {

const u32 LANES = 32;
const size_t STACK = 256 << 10;

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::vector<u8> stack;
  bool started = false, done = false;
  // How many barriers of the block, and of its warp, it has come to.
  u64 block_turn = 0, warp_turn = 0;
  u32 index = 0;
};

struct Machine {
  std::vector<Fiber> fibers;
  jmp_buf loop;
  Fiber* now = nullptr;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  std::vector<u64> slots;
  std::vector<u8> shared;
  u64 seed = 1;

  u64 random() {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
  }
};
inline Machine machine;

// Arrives when it is waited for, as late as it may.
struct LateCopy {
  u8 data[16];
  void* to;
  u32 size;
};
struct LateCopies {
  std::vector<std::vector<LateCopy>> groups = std::vector<std::vector<LateCopy>>(1);
};
inline std::vector<LateCopies> late_copies(1024);

inline void enter() {
  machine.body(machine.argument);
  auto& groups = late_copies[machine.now->index].groups;
  for (auto& group : groups) {
    if (group.empty()) continue;
    fprintf(stderr, "a thread ends while copies to shared memory are under way\n");
    abort();
  }
  groups.assign(1, {});
  machine.now->done = true;
  _longjmp(machine.loop, 1);
}

// Back to the loop until this fiber is taken again.
inline void pause() {
  if (_setjmp(machine.now->at) == 0) _longjmp(machine.loop, 1);
}

inline void resume(Fiber& f) {
  machine.now = &f;
  threadIdx = {f.index, 0, 0};
  if (_setjmp(machine.loop)) return;
  if (f.started) _longjmp(f.at, 1);
  f.started = true;
  getcontext(&f.start);
  f.stack.resize(STACK);
  f.start.uc_stack.ss_sp = f.stack.data();
  f.start.uc_stack.ss_size = f.stack.size();
  f.start.uc_link = nullptr;
  makecontext(&f.start, enter, 0);
  setcontext(&f.start);
}

inline void block_barrier() {
  machine.now->block_turn++;
  pause();
}
inline void warp_barrier() {
  machine.now->warp_turn++;
  pause();
}

template <class T> T exchange(T value, u32 from) {
  u32 first = machine.now->index / LANES * LANES;
  u64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  machine.slots[machine.now->index] = bits;
  warp_barrier();
  u32 at = first + from;
  u64 got = at < machine.slots.size() ? machine.slots[at] : bits;
  warp_barrier();
  T out;
  memcpy(&out, &got, sizeof out);
  return out;
}

// Runs every block of a grid. A fiber goes on when nobody of its block, or warp, has come to fewer barriers.
inline void run(Dim grid, Dim block, u32 shared, u64 seed, void (*body)(void*), void* argument) {
  Machine& m = machine;
  m.body = body;
  m.argument = argument;
  m.seed = seed | 1;
  gridDim = grid;
  blockDim = block;
  u32 threads = block.x;
  // Memory that nobody wrote holds what is no number.
  m.shared.assign(shared + 64, 0xff);
  if (m.fibers.size() < threads) m.fibers.resize(threads);
  while (m.fibers.size() > threads) m.fibers.pop_back();
  m.slots.assign(threads, 0);
  std::vector<u32> order(threads);
  for (u32 z = 0; z < grid.z; z++)
    for (u32 y = 0; y < grid.y; y++)
      for (u32 x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        for (u32 i = 0; i < threads; i++) {
          Fiber& f = m.fibers[i];
          f.started = f.done = false;
          f.block_turn = f.warp_turn = 0;
          f.index = i;
          order[i] = i;
        }
        u32 left = threads;
        while (left > 0) {
          for (u32 i = threads; i > 1; i--) std::swap(order[i - 1], order[m.random() % i]);
          // What everybody has come to, once a sweep: a barrier opens for the next sweep.
          u64 least_block = ~0ull;
          std::vector<u64> least_warp((threads + LANES - 1) / LANES, ~0ull);
          for (Fiber& f : m.fibers)
            if (!f.done && f.block_turn < least_block) least_block = f.block_turn;
          for (Fiber& f : m.fibers)
            if (!f.done && f.block_turn == least_block && f.warp_turn < least_warp[f.index / LANES])
              least_warp[f.index / LANES] = f.warp_turn;
          // A warp in four sits a sweep out: one may be far ahead of another.
          u64 idle = m.random() & m.random();
          for (u32 i : order) {
            Fiber& f = m.fibers[i];
            if (idle >> i / LANES & 1) continue;
            if (f.done || f.block_turn > least_block || f.warp_turn > least_warp[i / LANES]) continue;
            resume(f);
            if (f.done) left--;
          }
        }
      }
}

template <class... A, size_t... I> void call(void (*f)(A...), void** args, std::index_sequence<I...>) {
  f(*(std::remove_reference_t<A>*)args[I]...);
}

template <class... A> void launch(void (*f)(A...), Dim grid, Dim block, u32 shared, u64 seed, void** args) {
  struct Job {
    void (*f)(A...);
    void** args;
  } job = {f, args};
  run(grid, block, shared, seed, [](void* j) {
    Job& job = *(Job*)j;
    call(job.f, job.args, std::index_sequence_for<A...>());
  }, &job);
}

inline u8* dynamic() { return (u8*)(((uintptr_t)machine.shared.data() + 63) / 64 * 64); }

}  // namespace host

#define KERNEL static void
#define DEVICE inline
#define SHARED static
#define CONSTANT static const
#define SHARED_BYTES(name) u8* name = host::dynamic()
#define THREADS(...)
#define ALL 0xffffffffu

inline void block_barrier() { host::block_barrier(); }
inline void __syncthreads() { host::block_barrier(); }
inline void __syncwarp() { host::warp_barrier(); }
template <class T> T __shfl_xor_sync(u32, T v, u32 mask) { return host::exchange(v, threadIdx.x % 32 ^ mask); }
template <class T> T __shfl_sync(u32, T v, u32 from) { return host::exchange(v, from % 32); }
template <class T> T __shfl_up_sync(u32, T v, u32 step) {
  u32 l = threadIdx.x % 32;
  return host::exchange(v, l >= step ? l - step : l);
}
template <class T> T __shfl_down_sync(u32, T v, u32 step) {
  u32 l = threadIdx.x % 32;
  return host::exchange(v, l + step < 32 ? l + step : l);
}
inline u32 __match_any_sync(u32, u32 v) {
  u32 found = 0;
  for (u32 l = 0; l < 32; l++)
    if (host::exchange(v, l) == v) found |= 1u << l;
  return found;
}
// The values of a warp's lanes, brought to one by `join`.
template <class F> u32 reduce(u32 v, F join) {
  host::Machine& m = host::machine;
  u32 first = m.now->index / 32 * 32, found = v;
  m.slots[m.now->index] = v;
  host::warp_barrier();
  for (u32 l = 0; l < 32; l++) found = join(found, (u32)m.slots[first + l]);
  host::warp_barrier();
  return found;
}
inline u32 __reduce_max_sync(u32, u32 v) {
  return reduce(v, [](u32 a, u32 b) { return a > b ? a : b; });
}
inline u32 __reduce_min_sync(u32, u32 v) {
  return reduce(v, [](u32 a, u32 b) { return a < b ? a : b; });
}
// The others' values are added to the lane's own, which is among them.
inline u32 __reduce_add_sync(u32, u32 v) {
  return reduce(v, [](u32 a, u32 b) { return a + b; }) - v;
}
// How many threads of the block say yes.
inline i32 __syncthreads_count(bool yes) {
  host::Machine& m = host::machine;
  m.slots[m.now->index] = yes;
  host::block_barrier();
  i32 count = 0;
  for (u64 slot : m.slots) count += slot != 0;
  host::block_barrier();
  return count;
}
inline u32 __ballot_sync(u32, bool v) {
  host::Machine& m = host::machine;
  u32 first = m.now->index / 32 * 32, found = 0;
  m.slots[m.now->index] = v;
  host::warp_barrier();
  for (u32 l = 0; l < 32; l++) found |= (u32)m.slots[first + l] << l;
  host::warp_barrier();
  return found;
}
inline u32 __popc(u32 v) { return __builtin_popcount(v); }
inline i32 __clz(u32 v) { return v ? __builtin_clz(v) : 32; }
inline i32 __ffs(u32 v) { return __builtin_ffs((i32)v); }
inline u32 atomicOr(u32* at, u32 v) {
  u32 before = *at;
  *at |= v;
  return before;
}
inline u32 atomicAdd(u32* at, u32 v) {
  u32 before = *at;
  *at += v;
  return before;
}

inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double fma_double_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float div_rn(float a, float b) { return a / b; }
inline float sqrt_rn(float a) { return std::sqrt(a); }
inline float recip_rn(float a) { return 1.0f / a; }
inline u32 bits_of(float a) {
  u32 b;
  memcpy(&b, &a, 4);
  return b;
}
inline float float_of(u32 a) {
  float b;
  memcpy(&b, &a, 4);
  return b;
}

inline void copy_late(void* to, const void* from, u32 size) {
  host::LateCopy c = {};
  if (from) memcpy(c.data, from, size);
  c.to = to;
  c.size = size;
  memset(to, 0xff, size);
  host::late_copies[threadIdx.x].groups.back().push_back(c);
}
inline void copy_async(void* to, const void* from) { copy_late(to, from, 16); }
inline void copy_async_one(float* to, const float* from, bool there) { copy_late(to, there ? from : nullptr, 4); }
inline void copy_commit() { host::late_copies[threadIdx.x].groups.emplace_back(); }
template <int left> void copy_wait() {
  auto& groups = host::late_copies[threadIdx.x].groups;
  while (groups.size() - 1 > left) {
    for (host::LateCopy& c : groups.front()) memcpy(c.to, c.data, c.size);
    groups.erase(groups.begin());
  }
}

inline float half_to_float(u16 h) {
  _Float16 v;
  memcpy(&v, &h, 2);
  return (float)v;
}
inline u16 float_to_half(float f) {
  _Float16 v = (_Float16)f;
  u16 h;
  memcpy(&h, &v, 2);
  return h;
}
// Exact in float for the codes' halves, so rounded once.
inline float half_pair_sum(u32 x) {
  return half_to_float(float_to_half(half_to_float((u16)x) + half_to_float((u16)(x >> 16))));
}
inline float half_fma(u32 a, u32 b, u32 c) {
  double exact = (double)half_to_float((u16)a) * half_to_float((u16)b) + half_to_float((u16)c);
  return half_to_float(float_to_half((float)exact));
}
inline void half_pair_fma(u32 a, u32 b, u32 c, float& x, float& y) {
  x = half_fma(a, b, c);
  y = half_fma(a >> 16, b >> 16, c >> 16);
}
inline u32 byte_sum(u32 a, u32 c) { return c + (a & 255) + (a >> 8 & 255) + (a >> 16 & 255) + (a >> 24); }
inline u32 funnel(u32 high, u32 low, u32 shift) { return shift ? high << shift | low >> (32 - shift) : high; }
inline u32 bytes_of(u32 a, u32 b, u32 which) {
  u32 found = 0;
  for (u32 i = 0; i < 4; i++) {
    u32 pick = which >> 4 * i & 7;
    found |= ((pick < 4 ? a : b) >> 8 * (pick % 4) & 255) << 8 * i;
  }
  return found;
}
inline void keep_order() {}
inline float load_past_first_cache(const float* from) { return *from; }
// Blocks run one after another: what one waits for is there, or never comes. A number that nobody has handed over, and one whose word still
// had another, is no number: so is what is made of it.
const u64 NO_NUMBER = 1ull << 32 | 0x7fc00000u;
inline void put_word(u64* to, u64 word) { *to = word != 0 && *to != 0 ? NO_NUMBER : word; }
inline u64 look_at_word(const u64* from) { return *from >> 32 ? *from : NO_NUMBER; }
