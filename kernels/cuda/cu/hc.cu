// Hyper-connections: `hc.dots`, `hc.finish`, `hc.post`. Bound: the bytes of the rows of x, four streams of D numbers; at one
// row latency, so whatever does not wait for something else is done beside it, in a block of its own.

// Numbers of a row that shared memory holds at a time, and those that are waited for at a time.
#define HELD_ROW 16384
#define QUARTER (HELD_ROW / 4)

// Sum of squares of a row, into the column behind its outputs, by the first warp of a block. All threads fetch, a quarter is added while the
// next ones are on their way. The 32 sums of the lanes are chains; k / 32 multiply-adds each are its time.
DEVICE void squares(const Chains& c, u32 row) {
  SHARED_BYTES(shared);
  if (row >= c.rows) return;
  float *held = (float*)shared, sum = 0.0f;
#pragma unroll 1
  for (u32 first = 0; first < c.k; first += HELD_ROW) {
    const float* x = c.x + (u64)row * c.x_stride + first;
    const u32 left = c.k - first;
    // Beyond the end there are zeros, up to the end of a quarter: they change no sum.
#pragma unroll 1
    for (u32 q = 0; q < 4; q++) {
      for (u32 at = q * QUARTER + 4 * threadIdx.x; at < (q + 1) * QUARTER && q * QUARTER < left; at += 4 * blockDim.x) {
        if (at + 4 <= left) copy_async(held + at, x + at);
        else
          for (u32 j = 0; j < 4; j++) held[at + j] = at + j < left ? x[at + j] : 0.0f;
      }
      copy_commit();
    }
    auto add = [&](u32 q) {
      __syncthreads();
      if (warp() != 0 || q * QUARTER >= left) return;
      const float* from = held + q * QUARTER + lane();
#pragma unroll 32
      for (u32 i = 0; i < QUARTER; i += 32) sum = fma_rn(from[i], from[i], sum);
    };
    copy_wait<3>();
    add(0);
    copy_wait<2>();
    add(1);
    copy_wait<1>();
    add(2);
    copy_wait<0>();
    add(3);
    __syncthreads();
  }
  if (warp() != 0) return;
  sum = tree(sum);
  if (lane() == 0) c.out[(u64)row * c.out_stride + c.n] = sum;
}

// The first blocks of a tile of rows add squares, a row each (they take longest); the others take a chain of the products.
template <class W> DEVICE void dots(const Chains& c) {
  if (blockIdx.x >= CHAIN_ROWS) chain<W>(c, blockIdx.x - CHAIN_ROWS, blockIdx.y, blockIdx.z);
  else if (blockIdx.z == 0) squares(c, blockIdx.y * CHAIN_ROWS + blockIdx.x);
}

KERNEL THREADS(128) hc_dots_bf16(Chains chains) { dots<u16>(chains); }
KERNEL THREADS(128) hc_dots_f32(Chains chains) { dots<float>(chains); }

#define MAX_STREAMS 8

// One over the root mean square of the row that the products are of.
DEVICE float dots_factor(float squares, u32 width, float eps) {
  return div_rn(1.0f, sqrt_rn(div_rn(squares, (float)width) + eps));
}

// Element e of a matrix whose elements e and e + 32 lie in lane e.
template <int HALVES> DEVICE float element(const float (&m)[HALVES], u32 e) {
  float v = __shfl_sync(ALL, m[0], e % 32);
  if constexpr (HALVES == 2) {
    float upper = __shfl_sync(ALL, m[1], e % 32);
    v = e < 32 ? v : upper;
  }
  return v;
}

// What `hc.post` needs of one row, by one warp: post, and comb (row i: stream i into stream j). A lane has an element of comb, or
// two, in registers, and adds those of its row or column in order. N is the number of streams where it is known when this is
// compiled: then the elements of a sum come side by side.
template <u32 N>
DEVICE void coefficients(
    const float* dots, u32 streams, u32 d, u32 steps, const float* base, const float* scale, float rms_eps, float hc_eps,
    float* post, float* comb) {
  constexpr int HALVES = N > 0 && N * N <= 32 ? 1 : 2;
  constexpr u32 MOST = N > 0 ? N : MAX_STREAMS;
  const u32 n = N > 0 ? N : streams, mixes = (2 + n) * n, l = lane();
  // All that is read, at once. Lanes beyond the last element repeat the first.
  float squares = dots[mixes], dot[HALVES], bias[HALVES], factor = scale[2], post_factor = scale[1];
  float post_dot = l < n ? dots[n + l] : 0.0f, post_bias = l < n ? base[n + l] : 0.0f;
  u32 row[HALVES], column[HALVES];
#pragma unroll
  for (u32 h = 0; h < HALVES; h++) {
    u32 e = l + 32 * h < n * n ? l + 32 * h : 0;
    dot[h] = dots[2 * n + e];
    bias[h] = base[2 * n + e];
    row[h] = e / n * n;
    column[h] = e % n;
  }
  float r = dots_factor(squares, n * d, rms_eps);
  if (l < n) post[l] = 2.0f * sigmoid_of(fma_rn(post_dot * r, post_factor, post_bias));
  // The softmax of each row, in order.
  float v[HALVES], top[HALVES], total[HALVES];
#pragma unroll
  for (u32 h = 0; h < HALVES; h++) {
    v[h] = fma_rn(dot[h] * r, factor, bias[h]);
    top[h] = -infinity();
    total[h] = 0.0f;
  }
#pragma unroll
  for (u32 j = 0; j < MOST; j++) {
    if (j < n) {
#pragma unroll
      for (u32 h = 0; h < HALVES; h++) {
        float other = element(v, row[h] + j);
        top[h] = other > top[h] ? other : top[h];
      }
    }
  }
#pragma unroll
  for (u32 h = 0; h < HALVES; h++) v[h] = exp_of(v[h] - top[h]);
#pragma unroll
  for (u32 j = 0; j < MOST; j++) {
    if (j < n) {
#pragma unroll
      for (u32 h = 0; h < HALVES; h++) total[h] = total[h] + element(v, row[h] + j);
    }
  }
#pragma unroll
  for (u32 h = 0; h < HALVES; h++) v[h] = div_rn(v[h], total[h]) + hc_eps;
  // Columns and rows in turn, columns first and last.
#pragma unroll 2
  for (u32 turn = 0; turn + 1 < 2 * steps; turn++) {
#pragma unroll
    for (u32 h = 0; h < HALVES; h++) total[h] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < MOST; i++) {
      if (i < n) {
#pragma unroll
        for (u32 h = 0; h < HALVES; h++) {
          total[h] = total[h] + element(v, turn % 2 == 0 ? i * n + column[h] : row[h] + i);
        }
      }
    }
#pragma unroll
    for (u32 h = 0; h < HALVES; h++) v[h] = div_rn(v[h], total[h] + hc_eps);
  }
#pragma unroll
  for (u32 h = 0; h < HALVES; h++) {
    if (l + 32 * h < n * n) comb[l + 32 * h] = v[h];
  }
}

#define FINISH_THREADS 512
// Streams whose numbers are fetched before the coefficients are there.
#define EARLY 4

// What a block reads: the streams collapsed and normed, and the coefficients for `hc.post`. A row has two blocks: one of a warp
// for the coefficients, whose steps depend on each other, and beside it one for the numbers. Of these the first FETCHED of
// each thread stay in registers from the fetch to the end; every warp makes the factors of the streams for itself.
KERNEL THREADS(512) hc_finish(
    const float* dots, u32 dots_stride, const float* x, u32 x_stride, const float* base, const float* scale,
    const float* norm, float rms_eps, float hc_eps, u32 n, u32 d, u32 steps, float* h, u32 h_stride, float* post,
    u32 post_stride, float* comb, u32 comb_stride) {
  const u32 held = FETCHED * FINISH_THREADS, l = lane();
  u64 row = blockIdx.x;
  dots += row * dots_stride;
  if (blockIdx.y == 1) {
    if (warp() != 0) return;
    post += row * post_stride;
    comb += row * comb_stride;
    if (n == EARLY) coefficients<EARLY>(dots, n, d, steps, base, scale, rms_eps, hc_eps, post, comb);
    else coefficients<0>(dots, n, d, steps, base, scale, rms_eps, hc_eps, post, comb);
    return;
  }
  x += row * x_stride;
  h += row * h_stride;
  // Before the streams: their numbers would be waited for first.
  float squares = dots[(2 + n) * n], factor = scale[0], dot = l < n ? dots[l] : 0.0f, bias = l < n ? base[l] : 0.0f;
  float early[FETCHED][EARLY], sums[FETCHED], weights[FETCHED];
#pragma unroll
  for (u32 j = 0; j < FETCHED; j++) {
    u32 i = threadIdx.x + j * FINISH_THREADS;
    sums[j] = 0.0f;
#pragma unroll
    for (u32 s = 0; s < EARLY; s++) early[j][s] = n == EARLY && i < d ? x[(u64)s * d + i] : 0.0f;
  }
#pragma unroll
  for (u32 j = 0; j < FETCHED; j++) {
    u32 i = threadIdx.x + j * FINISH_THREADS;
    weights[j] = i < d ? norm[i] : 0.0f;
  }
  float own = sigmoid_of(fma_rn(dot * dots_factor(squares, n * d, rms_eps), factor, bias)) + hc_eps, pre[MAX_STREAMS];
#pragma unroll
  for (u32 s = 0; s < MAX_STREAMS; s++) pre[s] = __shfl_sync(ALL, own, s);
  float r = rms_factor(
      block_squares_at(
          d,
          [&](u32 i, u32 j) {
            float sum = 0.0f;
            if (n == EARLY && i < held) {
#pragma unroll
              for (u32 s = 0; s < EARLY; s++) sum = fma_rn(pre[s], early[j][s], sum);
            } else {
#pragma unroll
              for (u32 s = 0; s < MAX_STREAMS; s++) {
                if (s < n) sum = fma_rn(pre[s], x[(u64)s * d + i], sum);
              }
            }
            if (i < held) sums[j] = sum;
            else h[i] = sum;
            return sum;
          }),
      d, rms_eps);
#pragma unroll
  for (u32 j = 0; j < FETCHED; j++) {
    u32 i = threadIdx.x + j * FINISH_THREADS;
    if (i < d) h[i] = sums[j] * r * weights[j];
  }
  for (u32 i = held + threadIdx.x; i < d; i += FINISH_THREADS) h[i] = h[i] * r * norm[i];
}

// What a block writes: out_j = post_j y + sum over i of comb_ij x_i, y being the sum of the ranks' parts. A thread a channel.
KERNEL THREADS(128) hc_post(
    const float* x, u32 x_stride, const float* parts, u32 parts_stride, const float* post, u32 post_stride,
    const float* comb, u32 comb_stride, u32 n, u32 d, u32 count, float* out, u32 out_stride) {
  SHARED float s_post[MAX_STREAMS], s_comb[MAX_STREAMS * MAX_STREAMS];
  u64 row = blockIdx.x;
  u32 i = blockIdx.y * blockDim.x + threadIdx.x, t = threadIdx.x;
  bool there = i < d;
  x += row * x_stride;
  parts += row * parts_stride;
  out += row * out_stride;
  // All loads are under way before the first is waited for.
  float coefficient = t < n * n ? comb[row * comb_stride + t] : 0.0f, share = t < n ? post[row * post_stride + t] : 0.0f;
  float y = there ? parts[i] : 0.0f, streams[MAX_STREAMS];
#pragma unroll
  for (u32 s = 0; s < MAX_STREAMS; s++) streams[s] = there && s < n ? x[(u64)s * d + i] : 0.0f;
  for (u32 p = 1; p < count && there; p++) y = y + parts[(u64)p * d + i];
  if (t < n * n) s_comb[t] = coefficient;
  if (t < n) s_post[t] = share;
  __syncthreads();
  if (!there) return;
  for (u32 j = 0; j < n; j++) {
    float sum = s_post[j] * y;
#pragma unroll
    for (u32 s = 0; s < MAX_STREAMS; s++) {
      if (s < n) sum = fma_rn(s_comb[s * n + j], streams[s], sum);
    }
    out[(u64)j * d + i] = sum;
  }
}
