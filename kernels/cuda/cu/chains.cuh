// Products of a few rows with panels, a chain of k a block: for weights with too few panels to fill a GPU, and `hc.dots`.
//
// A block takes CHAIN of k of two panels for four rows: its threads bring weights and inputs to shared memory at once, so that
// the latency of memory is there once; then a warp takes a row, and a lane an output. Blocks hand their sums over to the one with the
// last chain, which adds them in order. Bound: the bytes of the weight; of a small one, latency: a fetch, CHAIN
// multiply-adds, a fetch of sums, an addition a chain.

#define PANEL 16
#define CHAIN 256
// Rows of a block, a warp each, and its outputs.
#define CHAIN_ROWS 4
#define CHAIN_OUTPUTS (2 * PANEL)
// Sums of chains that are fetched at a time.
#define CHAINS_AT_ONCE 32

// The operands. Rows of x start on multiples of 16 bytes. `handed`: [row][chain][outputs, filled up to whole pairs of panels].
struct Chains {
  const float* x;
  const u8* w;
  const float* bias;
  float* out;
  u64* handed;
  // The output rows, where they do not lie in `out`.
  Cached to;
  u32 x_stride, out_stride, rows, n, k, unused;
};

template <class W> struct ChainRoom {
  // Bytes of a panel: a row more than it has, so that the lanes of two panels do not meet in a bank.
  enum : u32 { panel = (CHAIN + 1) * PANEL * sizeof(W) };
};

DEVICE float weight_of(u16 w) { return float_of((u32)w << 16); }
DEVICE float weight_of(float w) { return w; }

// Chain `index` of rows `4 * tile ..` and panels `2 * pair ..`, by a block of four warps.
template <class W> DEVICE void chain(const Chains& c, u32 index, u32 tile, u32 pair) {
  SHARED_BYTES(shared);
  const u32 size = ChainRoom<W>::panel, panels = (c.n + PANEL - 1) / PANEL, pairs = (panels + 1) / 2;
  const u32 chains = (c.k + CHAIN - 1) / CHAIN, from = index * CHAIN, count = low(CHAIN, c.k - from);
  const u32 first = tile * CHAIN_ROWS, rows = low(CHAIN_ROWS, c.rows - first);
  float* inputs = (float*)(shared + 2 * size);
  for (u32 p = 0; p < 2 && 2 * pair + p < panels; p++) {
    const u8* w = c.w + ((u64)(2 * pair + p) * c.k + from) * PANEL * sizeof(W);
#pragma unroll 4
    for (u32 at = threadIdx.x * 16; at < count * PANEL * sizeof(W); at += blockDim.x * 16) copy_async(shared + p * size + at, w + at);
  }
  for (u32 i = threadIdx.x; i < rows * (CHAIN / 4); i += blockDim.x) {
    u32 r = i / (CHAIN / 4), at = i % (CHAIN / 4) * 4;
    const float* x = c.x + (u64)(first + r) * c.x_stride + from + at;
    float* here = inputs + r * CHAIN + at;
    if (at + 4 <= count) copy_async(here, x);
    else
      for (u32 j = 0; at + j < count; j++) here[j] = x[j];
  }
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  if (warp() >= rows || 2 * pair + lane() / PANEL >= panels) return;
  const u64 next = (u64)pairs * CHAIN_OUTPUTS;
  u64* handed = c.handed + (u64)(first + warp()) * chains * next + pair * CHAIN_OUTPUTS + lane();
  const u32 column = pair * CHAIN_OUTPUTS + lane();
  const bool last = index + 1 == chains;
  // Whoever needs it asks for it before the sums are there.
  float* row = nullptr;
  if (last) row = c.to.round ? c.to.row(first + warp()) : c.out + (u64)(first + warp()) * c.out_stride;
  const W* w = (const W*)(shared + lane() / PANEL * size) + lane() % PANEL;
  const float* x = inputs + warp() * CHAIN;
  float sum = 0.0f;
  u32 i = 0;
#pragma unroll 4
  for (; i + 4 <= count; i += 4) {
    Float4 v = *(const Float4*)(x + i);
#pragma unroll
    for (u32 j = 0; j < 4; j++) sum = fma_rn(v.v[j], weight_of(w[(i + j) * PANEL]), sum);
  }
#pragma unroll 1
  for (; i < count; i++) sum = fma_rn(x[i], weight_of(w[i * PANEL]), sum);
  if (!last) {
    hand_over(handed + index * next, sum);
    return;
  }
  float total = 0.0f;
#pragma unroll 1
  for (u32 base = 0; base < index; base += CHAINS_AT_ONCE) {
    float v[CHAINS_AT_ONCE];
    take_over(handed + base * next, next, low(CHAINS_AT_ONCE, index - base), v);
#pragma unroll
    for (u32 j = 0; j < CHAINS_AT_ONCE; j++) {
      if (base + j < index) total = total + v[j];
    }
  }
  total = total + sum;
  if (c.bias && column < c.n) total = total + c.bias[column];
  if (column < c.n) row[column] = total;
}
