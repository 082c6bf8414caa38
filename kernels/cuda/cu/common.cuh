// What all kernels share. No header of CUDA is needed: a compiler without any folder of headers compiles this.
//
// The arithmetic is that of the CPU's reference, operation by operation: every multiply-add is written as one, nothing else
// may be fused (the sources are compiled with --fmad=false), divisions and roots are correctly rounded, and every sum has
// the reference's order. So a kernel's bits are the reference's bits, on every GPU.

#ifdef PLUGFOLD_HOST
// Compiled as C++ for tests without a GPU: host.hpp brings threads, barriers and shuffles.
#else
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
// Numbers that all threads of a warp read at once. The compiler does not know them, or it would write them into the code.
#define CONSTANT __constant__
#define SHARED_BYTES(name) extern __shared__ __align__(16) u8 name[]
// Most threads of a block, and how many blocks shall fit a multiprocessor at least. One where that is not said: without it the
// compiler saves registers until it spills.
#define THREADS(...) THREADS_AND_BLOCKS(__VA_ARGS__, 1, 1)
#define THREADS_AND_BLOCKS(n, blocks, ...) __launch_bounds__(n, blocks)
#define ALL 0xffffffffu

DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double fma_double_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
// As 1 / a.
DEVICE float recip_rn(float a) { return __frcp_rn(a); }
DEVICE u32 bits_of(float a) { return __float_as_uint(a); }
DEVICE float float_of(u32 a) { return __uint_as_float(a); }

// 16 bytes from global to shared memory, without passing through registers.
DEVICE void copy_async(void* to, const void* from) {
  u32 at = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
// The same of one number, zero where there is none: `from` is not read then.
DEVICE void copy_async_one(float* to, const float* from, bool there) {
  u32 at = (u32)__cvta_generic_to_shared(to), size = there ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(size) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `left` of the committed groups are under way.
template <int left> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }

DEVICE float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
DEVICE u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
// Sum of the two halves in a word, rounded to half.
DEVICE float half_pair_sum(u32 x) {
  float f;
  asm("{.reg .b16 a, b, s; mov.b32 {a, b}, %1; add.rn.f16 s, a, b; cvt.f32.f16 %0, s;}" : "=f"(f) : "r"(x));
  return f;
}
// a * b + c in halves, rounded once.
DEVICE float half_fma(u32 a, u32 b, u32 c) {
  float f;
  asm("{.reg .b16 a, b, c, s; cvt.u16.u32 a, %1; cvt.u16.u32 b, %2; cvt.u16.u32 c, %3; fma.rn.f16 s, a, b, c;"
      " cvt.f32.f16 %0, s;}"
      : "=f"(f)
      : "r"(a), "r"(b), "r"(c));
  return f;
}
// a * b + c in each of the two halves of a word, rounded once: x the lower, y the upper.
DEVICE void half_pair_fma(u32 a, u32 b, u32 c, float& x, float& y) {
  asm("{.reg .b32 s; .reg .b16 l, h; fma.rn.f16x2 s, %2, %3, %4; mov.b32 {l, h}, s; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(x), "=f"(y)
      : "r"(a), "r"(b), "r"(c));
}
// c + the sum of the four bytes of a.
DEVICE u32 byte_sum(u32 a, u32 c) {
  u32 r;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x01010101u), "r"(c));
  return r;
}
// The upper word of high:low << shift, shift below 32.
DEVICE u32 funnel(u32 high, u32 low, u32 shift) { return __funnelshift_l(low, high, shift); }
// Bytes picked from a (0 to 3) and b (4 to 7): a digit of `which` each, the lowest byte's last.
DEVICE u32 bytes_of(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }
// Waits for all warps of the block, which may do so at different places.
DEVICE void block_barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
// Keeps the compiler from moving loads and stores past this place.
DEVICE void keep_order() { asm volatile("" ::: "memory"); }
// A number from the second-level cache, though the first may have it.
DEVICE float load_past_first_cache(const float* from) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
// A word that another block of the launch reads, whole or not at all; what it was is gone.
DEVICE void put_word(u64* to, u64 word) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory"); }
DEVICE u64 look_at_word(const u64* from) {
  u64 word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
#endif

struct alignas(16) Float4 {
  float v[4];
};

DEVICE float infinity() { return float_of(0x7f800000u); }
DEVICE u32 warp() { return threadIdx.x / 32; }
DEVICE u32 lane() { return threadIdx.x % 32; }
DEVICE u32 low(u32 a, u32 b) { return a < b ? a : b; }

// ---- elementary functions, as in the reference's `num` ----

// e^x.
DEVICE float exp_of(float x) {
  const float log2_e = 1.44269504088896340736f, ln2_hi = 0.6933594f, ln2_lo = -2.1219444e-4f, round = 12582912.0f;
  x = x > 89.0f ? 89.0f : x;
  x = x < -105.0f ? -105.0f : x;
  float t = fma_rn(x, log2_e, round);
  float n = t - round;
  float r = fma_rn(n, -ln2_hi, x);
  r = fma_rn(n, -ln2_lo, r);
  float p = fma_rn(r, 1.0f / 5040.0f, 1.0f / 720.0f);
  p = fma_rn(p, r, 1.0f / 120.0f);
  p = fma_rn(p, r, 1.0f / 24.0f);
  p = fma_rn(p, r, 1.0f / 6.0f);
  p = fma_rn(p, r, 0.5f);
  p = fma_rn(p, r * r, r) + 1.0f;
  i32 i = (i32)(bits_of(t) - bits_of(round));
  i32 half = i >> 1;
  float a = float_of((u32)(half + 127) << 23);
  float b = float_of((u32)(i - half + 127) << 23);
  return p * a * b;
}

// Natural logarithm.
DEVICE float ln_of(float x) {
  const float ln2_hi = 0.6933594f, ln2_lo = -2.1219444e-4f;
  bool small = x < float_of(0x00800000u);
  float v = small ? x * 8388608.0f : x;
  float shift = small ? -23.0f : 0.0f;
  u32 bits = bits_of(v);
  i32 exponent = (i32)(bits - 0x3f3504f3u) >> 23;
  float m = float_of(bits - ((u32)exponent << 23));
  float e = (float)exponent + shift;
  float f = m - 1.0f;
  float s = div_rn(f, 2.0f + f);
  float z = s * s;
  float p = fma_rn(z, 2.0f / 11.0f, 2.0f / 9.0f);
  p = fma_rn(p, z, 2.0f / 7.0f);
  p = fma_rn(p, z, 2.0f / 5.0f);
  p = fma_rn(p, z, 2.0f / 3.0f) * z;
  float y = f - (s * (f - p) - e * ln2_lo);
  y = fma_rn(e, ln2_hi, y);
  y = x == infinity() ? x : y;
  y = x == 0.0f ? -infinity() : y;
  return (x < 0.0f || x != x) ? float_of(0x7fc00000u) : y;
}

DEVICE float sigmoid_of(float x) { return recip_rn(1.0f + exp_of(-x)); }
DEVICE float silu_of(float x) { return x * sigmoid_of(x); }

// ln(1 + e^x).
DEVICE float softplus_of(float x) {
  float e = exp_of(-float_of(bits_of(x) & 0x7fffffffu));
  float u = 1.0f + e;
  float log = u == 1.0f ? e : ln_of(u) * div_rn(e, u - 1.0f);
  float top = x > 0.0f ? x : 0.0f;
  return top + log;
}

// A key that orders like the number; 0 and -0 are equal, NaN is below everything.
DEVICE u32 ordered(float value) {
  u32 bits = bits_of(value + 0.0f), key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return value == value ? key : 0;
}

// ---- sums in the reference's order: element i goes to partial sum i % 32, these are added pairwise ----

// The partial sums of a warp's lanes, added: every lane gets the sum.
DEVICE float tree(float v) {
  v = v + __shfl_xor_sync(ALL, v, 16);
  v = v + __shfl_xor_sync(ALL, v, 8);
  v = v + __shfl_xor_sync(ALL, v, 4);
  v = v + __shfl_xor_sync(ALL, v, 2);
  return v + __shfl_xor_sync(ALL, v, 1);
}

// As `tree` for N sums at a time, N a power of two: lanes swap halves of what they hold, so that each of the five steps moves
// half as much as the one before. Lane l ends with sums `many_index<N>(l) ..`, as many as `N / 32`, or one.
template <int N, int MASK> DEVICE void tree_steps(float (&v)[N > 1 ? N : 1]) {
  if constexpr (MASK > 0) {
    if constexpr (N > 1) {
      bool upper = lane() & MASK;
      float kept[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        float send = upper ? v[i] : v[i + N / 2];
        kept[i] = (upper ? v[i + N / 2] : v[i]) + __shfl_xor_sync(ALL, send, MASK);
      }
      tree_steps<N / 2, MASK / 2>(kept);
#pragma unroll
      for (int i = 0; i < N / 2; i++) v[i] = kept[i];
    } else {
      v[0] = v[0] + __shfl_xor_sync(ALL, v[0], MASK);
      tree_steps<1, MASK / 2>(v);
    }
  }
}
template <int N> DEVICE void tree_many(float (&v)[N]) { tree_steps<N, 16>(v); }
template <int N> DEVICE u32 many_index(u32 l) {
  u32 index = 0, half = N / 2;
#pragma unroll
  for (u32 mask = 16; mask > 0; mask /= 2) {
    if (half > 0 && (l & mask)) index += half;
    half /= 2;
  }
  return index;
}

// Numbers on their way from blocks to one that comes later in the grid, and so never keeps them from running: a word each, with the number below
// and one above. Between launches words are 0. Nobody has to wait until all that was written before can be seen, as with a counter.
DEVICE void hand_over(u64* to, float v) { put_word(to, (u64)1 << 32 | bits_of(v)); }
// `count` of them, at most N, `stride` words apart, when all are there.
template <u32 N> DEVICE void take_over(u64* from, u64 stride, u32 count, float (&v)[N]) {
  u64 words[N];
  bool all;
  do {
    all = true;
    // Beyond the end the last one again.
#pragma unroll
    for (u32 j = 0; j < N; j++) words[j] = look_at_word(from + low(j, count - 1) * stride);
#pragma unroll
    for (u32 j = 0; j < N; j++) all = all && words[j] >> 32 != 0;
  } while (!all);
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    v[j] = float_of((u32)words[j]);
    if (j < count) put_word(from + j * stride, 0);
  }
}

// Elements that a block stages at a time for one of its warps to sum. A multiple of 32.
#define STAGE 4096

// Values that a thread fetches at a time.
#define FETCHED 8

// Stores `load(i)` by `store(i, value)`, i below n, by all threads of a block. Several loads before the first store: the compiler
// must take a store for one of what is loaded next, and a thread would wait for memory each time.
template <class L, class S> DEVICE void moved(u32 n, L load, S store) {
  for (u32 base = threadIdx.x; base < n; base += FETCHED * blockDim.x) {
    float v[FETCHED];
#pragma unroll
    for (u32 j = 0; j < FETCHED; j++) v[j] = load(low(base + j * blockDim.x, n - 1));
#pragma unroll
    for (u32 j = 0; j < FETCHED; j++) {
      if (base + j * blockDim.x < n) store(base + j * blockDim.x, v[j]);
    }
  }
}

// Sum of squares of `value(i, j)`, i below n, to all threads of a block. Its first warp adds; all fetch, thread t value
// t + j * threads of every FETCHED * threads.
template <class F> DEVICE float block_squares_at(u32 n, F value) {
  SHARED float stage[STAGE];
  SHARED float result;
  float sum = 0.0f;
  for (u32 first = 0; first < n; first += STAGE) {
    u32 count = low(STAGE, n - first);
    u32 padded = (count + 31) / 32 * 32;
    for (u32 base = threadIdx.x; base < padded; base += FETCHED * blockDim.x) {
      float v[FETCHED];
#pragma unroll
      for (u32 j = 0; j < FETCHED; j++) {
        u32 i = base + j * blockDim.x;
        v[j] = i < count ? value(first + i, j) : 0.0f;
      }
#pragma unroll
      for (u32 j = 0; j < FETCHED; j++) {
        if (base + j * blockDim.x < padded) stage[base + j * blockDim.x] = v[j];
      }
    }
    __syncthreads();
    if (warp() == 0) {
#pragma unroll 16
      for (u32 i = lane(); i < padded; i += 32) sum = fma_rn(stage[i], stage[i], sum);
    }
    __syncthreads();
  }
  if (warp() == 0) {
    sum = tree(sum);
    if (lane() == 0) result = sum;
  }
  __syncthreads();
  float found = result;
  __syncthreads();
  return found;
}
template <class F> DEVICE float block_squares(u32 n, F value) {
  return block_squares_at(n, [&](u32 i, u32) { return value(i); });
}

// The factor of an RMS norm: one over the root of the mean of squares.
DEVICE float rms_factor(float squares, u32 n, float eps) {
  return recip_rn(sqrt_rn(div_rn(squares, (float)n) + eps));
}

// ---- the round table of a forward, in device memory at a fixed address ----

struct Round {
  const u32 *tokens, *positions, *row_seq, *seq_first, *seq_rows, *seq_start, *seq_slot, *seq_parity, *seq_keep, *out_rows;
  // Addresses of rows that stand in for embeddings, 0 where there is none; null: none at all.
  const u64* embeds;
  u32 rows, seqs, outs, unused;
};

// A cache family of one layer. Row addresses were checked against the round table before the launch.
struct Cache {
  u8* base;
  u64 slot_stride, parity_stride, row_bytes;
  DEVICE float* row(u32 slot, u32 parity, u64 row) const {
    return (float*)(base + slot * slot_stride + parity * parity_stride + row * row_bytes);
  }
};

// The cache rows of a call's rows, each at its position; none where `round` is null.
struct Cached {
  const Round* round;
  Cache cache;
  u32 first_row, unused;
  DEVICE float* row(u32 i) const {
    u32 at = first_row + i, seq = round->row_seq[at];
    return cache.row(round->seq_slot[seq], round->seq_parity[seq], round->positions[at]);
  }
};

// Walks the orthonormal Walsh-Hadamard transform over 32 lanes times PER consecutive values each, butterflies from index
// bit 0 upward, the factor last.
template <int PER> DEVICE void hadamard(float (&v)[PER], float factor) {
#pragma unroll
  for (int stride = 1; stride < PER; stride *= 2) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
      if (!(i & stride)) {
        float a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
    }
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    // Sum or difference in one instruction: the product is exact.
    float sign = lane() & mask ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) v[i] = fma_rn(v[i], sign, __shfl_xor_sync(ALL, v[i], mask));
  }
#pragma unroll
  for (int i = 0; i < PER; i++) v[i] = v[i] * factor;
}
