// Products with packed weights, `out = x W^T (+ bias)`: `dense`, `head`, `moe.logits`, `hc.dots`, `mla.write`, and over
// lists of rows `moe.up` and `moe.down`.
//
// A weight is `[n/16][k][16]`, in bf16 or f32. An output is a chain of multiply-adds over k in order, cut into blocks of
// 256; the blocks' chains start at zero and are added in order. Nothing else decides its bits, so the kernels below agree.
//
// - `stream`: 1, 4 or 8 rows. A block of two warps takes a panel; each lane takes two outputs of one block of k, so that
//   eight blocks of k go at once. Weights come through shared memory in two stages. Bound: the bytes of the weight.
// - `chains`: for matrices with too few panels to fill a GPU: the blocks of k are spread too (chains.cuh).
// - `tile`: more rows. 64 by 64 outputs a block, 4 by 4 a thread. Bound: the rate of f32 multiply-adds.

// Blocks of k that a block of threads works on at a time.
#define GROUP 8

// How a product of R rows is cut into stages. One row reads its inputs where they are; of more rows they are staged too.
template <class W, int R> struct Cut {
  enum : u32 {
    // Bytes of a block of k in one stage, and k of it.
    bytes = R == 1 ? 4096 : 2048,
    rows = bytes / (PANEL * sizeof(W)),
    steps = CHAIN / rows,
    // Blocks lie 32 bytes apart from a multiple of all banks, so that lanes of different blocks do not collide; inputs 16.
    stride = bytes + 32,
    weights = GROUP * stride,
    x_stride = rows + 4,
    inputs = R == 1 ? 0 : R * GROUP * x_stride * 4,
    stage = weights + inputs
  };
};

struct Pair {
  float a, b;
};
DEVICE Pair pair_of(const u16* w) {
  u32 both = *(const u32*)w;
  return {float_of(both << 16), float_of(both & 0xffff0000u)};
}
DEVICE Pair pair_of(const float* w) { return {w[0], w[1]}; }

// The weight that a block reads, and where its outputs go.
struct Part {
  const u8* w;
  u32 n, k;
  // First input and first output of the part; whether its result is added to what is there.
  u32 input, output;
  bool adds;
};

// What the kernels are given of a weight: a stack of matrices, or a part of each matrix of a table.
struct Stack {
  const u8* data;
  u32 n, k;
  Segments segments;
  u32 part, unused;
};

template <class W> DEVICE bool part_of(const Stack& stack, u32 matrix, Part& part) {
  if (stack.data) {
    u64 size = (u64)((stack.n + PANEL - 1) / PANEL) * PANEL * stack.k * sizeof(W);
    part = {stack.data + matrix * size, stack.n, stack.k, 0, 0, false};
    return true;
  }
  const Segment* s = stack.segments.of(matrix, stack.part);
  if (!s || s->kind != (sizeof(W) == 2 ? SEGMENT_BF16 : SEGMENT_F32)) return false;
  part = {stack.segments.line(s->data), s->n, s->k, s->input, s->output, s->input > 0};
  return true;
}

DEVICE void put(float* at, float sum, const float* bias, u32 column, bool adds) {
  if (bias) sum = sum + bias[column];
  *at = adds ? *at + sum : sum;
}

// One stage of eight blocks of k to shared memory: step `step` of the blocks from `first` on. What lies beyond k is left out.
template <class W, int R> DEVICE void fetch(u8* stage, const u8* panel, const float* const* x, u32 k, u32 first, u32 step) {
  typedef Cut<W, R> C;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < GROUP * C::bytes / 16; i += 64) {
    u32 block = i / (C::bytes / 16), at = i % (C::bytes / 16) * 16;
    u32 row = (first + block) * CHAIN + step * C::rows + at / (u32)(PANEL * sizeof(W));
    if (row < k) {
      u64 from = ((u64)(first + block) * CHAIN + step * C::rows) * PANEL * sizeof(W) + at;
      copy_async(stage + block * C::stride + at, panel + from);
    }
  }
  if constexpr (R > 1) {
    float* to = (float*)(stage + C::weights);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < R * GROUP * C::rows / 4; i += 64) {
      u32 quad = i % (C::rows / 4) * 4, block = i / (C::rows / 4) % GROUP, r = i / (C::rows / 4) / GROUP;
      u32 at = (first + block) * CHAIN + step * C::rows + quad;
      float* here = to + (r * GROUP + block) * C::x_stride + quad;
      if (at + 4 <= k) copy_async(here, x[r] + at);
      else
        for (u32 j = 0; at + j < k; j++) here[j] = x[r][at + j];
    }
  }
  copy_commit();
}

// Sums of the blocks of k of a panel for R rows, whose addresses are in `x` and multiples of 16 bytes.
// `done(count)` is called when the sums of the next `count` blocks lie in `sums[block][row][16]`, and may read them until it
// returns.
template <class W, int R, class F>
DEVICE void stream_panel(u8* stages, float* sums, const u8* panel, u32 k, const float* const* x, F done) {
  typedef Cut<W, R> C;
  const u32 block = threadIdx.x / 8, column = threadIdx.x % 8 * 2;
  u32 blocks = (k + CHAIN - 1) / CHAIN, total = (blocks + GROUP - 1) / GROUP * C::steps;
  const float* x0 = x[0];
  float acc[R][2];
  fetch<W, R>(stages, panel, x, k, 0, 0);
#pragma unroll 1
  for (u32 s = 0; s < total; s++) {
    u32 group = s / C::steps * GROUP, step = s % C::steps;
    if (s + 1 < total) {
      fetch<W, R>(stages + (s + 1) % 2 * C::stage, panel, x, k, (s + 1) / C::steps * GROUP, (s + 1) % C::steps);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    if (step == 0) {
#pragma unroll
      for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = 0.0f;
    }
    const u8* stage = stages + s % 2 * C::stage;
    const W* w = (const W*)(stage + block * C::stride) + column;
    u32 at = (group + block) * CHAIN + step * C::rows;
    u32 count = at < k ? low((u32)C::rows, k - at) : 0, i = 0;
    // Row r's inputs from `at` on.
    const float* inputs = R == 1 ? x0 + at : (const float*)(stage + C::weights) + block * C::x_stride;
    const u32 next = GROUP * C::x_stride;
#pragma unroll (R == 1 ? 4 : 2)
    for (; i + 4 <= count; i += 4) {
      Float4 v[R];
#pragma unroll
      for (int r = 0; r < R; r++) v[r] = *(const Float4*)(inputs + r * next + i);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        Pair pair = pair_of(w + (i + j) * PANEL);
#pragma unroll
        for (int r = 0; r < R; r++) {
          acc[r][0] = fma_rn(v[r].v[j], pair.a, acc[r][0]);
          acc[r][1] = fma_rn(v[r].v[j], pair.b, acc[r][1]);
        }
      }
    }
#pragma unroll 1
    for (; i < count; i++) {
      Pair pair = pair_of(w + i * PANEL);
#pragma unroll
      for (int r = 0; r < R; r++) {
        float v = inputs[r * next + i];
        acc[r][0] = fma_rn(v, pair.a, acc[r][0]);
        acc[r][1] = fma_rn(v, pair.b, acc[r][1]);
      }
    }
    if (step + 1 == C::steps) {
#pragma unroll
      for (int r = 0; r < R; r++) {
        sums[(block * R + r) * PANEL + column] = acc[r][0];
        sums[(block * R + r) * PANEL + column + 1] = acc[r][1];
      }
      __syncthreads();
      done(low(GROUP, blocks - group));
    }
    __syncthreads();
  }
}

// Addresses of R rows of a tile, in shared memory; rows beyond its last repeat that.
template <int R> DEVICE const float* const* addresses(const Rows& rows, const Tile& tile, u32 input) {
  SHARED const float* s_x[R];
  if (threadIdx.x < R) s_x[threadIdx.x] = rows.input(tile.first + low(threadIdx.x, tile.count - 1)) + input;
  __syncthreads();
  return s_x;
}

// `stream`: a panel for R rows, all blocks of k.
template <class W, int R> DEVICE void stream(const Rows& rows, const Stack& stack, const float* bias) {
  SHARED_BYTES(shared);
  // A thread's own outputs: R * 16 of them over 64 threads.
  const u32 own = (R * PANEL + 63) / 64;
  Tile tile = tile_of(rows, blockIdx.y, R);
  Part part;
  u32 panel = blockIdx.x;
  if (tile.count == 0 || !part_of<W>(stack, tile.matrix, part) || panel * PANEL >= part.n) return;
  float* sums = (float*)(shared + 2 * Cut<W, R>::stage);
  const float* const* x = addresses<R>(rows, tile, part.input);
  const u8* w = part.w + (u64)panel * PANEL * part.k * sizeof(W);
  float total[own];
#pragma unroll
  for (u32 i = 0; i < own; i++) total[i] = 0.0f;
  stream_panel<W, R>(shared, sums, w, part.k, x, [&](u32 count) {
#pragma unroll
    for (u32 i = 0; i < own; i++) {
      u32 mine = threadIdx.x + 64 * i;
#pragma unroll 1
      for (u32 b = 0; b < count && mine < R * PANEL; b++) total[i] = total[i] + sums[b * R * PANEL + mine];
    }
  });
#pragma unroll
  for (u32 i = 0; i < own; i++) {
    u32 mine = threadIdx.x + 64 * i, r = mine / PANEL, column = panel * PANEL + mine % PANEL;
    if (r < tile.count && r < R && column < part.n) {
      put(rows.output(tile.first + r) + part.output + column, total[i], bias, part.output + column, part.adds);
    }
  }
}

#define TILE 64
#define DEPTH 16

template <class W> DEVICE void tile_product(const Rows& rows, const Stack& stack, const float* bias) {
  SHARED Float4 s_x[DEPTH][TILE / 4 + 1], s_w[DEPTH][TILE / 4 + 1];
  Tile tile = tile_of(rows, blockIdx.y, TILE);
  Part part;
  if (tile.count == 0 || !part_of<W>(stack, tile.matrix, part)) return;
  u32 first = blockIdx.x * TILE;
  if (first >= part.n) return;
  // What this thread fetches: four inputs of a row, and four neighbours of a panel.
  u32 t = threadIdx.x, row = t / 4, depth = t % 4 * 4;
  const float* x = rows.input(tile.first + low(row, tile.count - 1)) + part.input;
  u32 panel = first / PANEL + t / 64, w_depth = t % 64 / 4, w_column = t % 4 * 4;
  bool panel_there = panel * PANEL < part.n;
  const W* w = (const W*)part.w + (u64)panel * PANEL * part.k + w_column;
  // What it computes: rows 4 y .., outputs 4 z ..
  u32 y = t / 16, z = t % 16;
  float acc[4][4], total[4][4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) acc[i][j] = total[i][j] = 0.0f;
  }
  for (u32 k = 0; k < part.k; k += DEPTH) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) s_x[depth + i][row / 4].v[row % 4] = k + depth + i < part.k ? x[k + depth + i] : 0.0f;
    Float4 four = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (panel_there && k + w_depth < part.k) {
      const W* from = w + (u64)(k + w_depth) * PANEL;
      Pair p = pair_of(from), q = pair_of(from + 2);
      four = {{p.a, p.b, q.a, q.b}};
    }
    s_w[w_depth][t / 64 * 4 + w_column / 4] = four;
    __syncthreads();
    u32 count = low(DEPTH, part.k - k);
    if (k % CHAIN == 0 && k > 0) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          total[i][j] = total[i][j] + acc[i][j];
          acc[i][j] = 0.0f;
        }
      }
    }
#pragma unroll 4
    for (u32 d = 0; d < count; d++) {
      Float4 a = s_x[d][y], b = s_w[d][z];
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) acc[i][j] = fma_rn(a.v[i], b.v[j], acc[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 r = 4 * y + i;
    if (r >= tile.count) continue;
    float* out = rows.output(tile.first + r) + part.output;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      u32 column = first + 4 * z + j;
      if (column < part.n) put(out + column, total[i][j] + acc[i][j], bias, part.output + column, part.adds);
    }
  }
}

KERNEL THREADS(64) panels_stream_bf16_1(Rows rows, Stack stack, const float* bias) { stream<u16, 1>(rows, stack, bias); }
KERNEL THREADS(64) panels_stream_bf16_4(Rows rows, Stack stack, const float* bias) { stream<u16, 4>(rows, stack, bias); }
KERNEL THREADS(64) panels_stream_bf16_8(Rows rows, Stack stack, const float* bias) { stream<u16, 8>(rows, stack, bias); }
KERNEL THREADS(128) panels_chains_bf16(Chains chains) { chain<u16>(chains, blockIdx.x, blockIdx.y, blockIdx.z); }
KERNEL THREADS(256) panels_tile_bf16(Rows rows, Stack stack, const float* bias) { tile_product<u16>(rows, stack, bias); }
KERNEL THREADS(64) panels_stream_f32_1(Rows rows, Stack stack, const float* bias) { stream<float, 1>(rows, stack, bias); }
KERNEL THREADS(64) panels_stream_f32_4(Rows rows, Stack stack, const float* bias) { stream<float, 4>(rows, stack, bias); }
KERNEL THREADS(64) panels_stream_f32_8(Rows rows, Stack stack, const float* bias) { stream<float, 8>(rows, stack, bias); }
KERNEL THREADS(128) panels_chains_f32(Chains chains) { chain<float>(chains, blockIdx.x, blockIdx.y, blockIdx.z); }
KERNEL THREADS(256) panels_tile_f32(Rows rows, Stack stack, const float* bias) { tile_product<float>(rows, stack, bias); }
