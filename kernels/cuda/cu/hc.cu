// Hyper-connections: `hc.dots` (the products are a matrix product; here the sum of squares), `hc.finish`, `hc.post`.
// A block a row. Bound: the bytes of the rows of x, four streams of D numbers.

// Sum of squares of rows of k numbers, into column 0 of `out`.
KERNEL THREADS(512) hc_squares(const float* x, u32 x_stride, u32 k, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  float sum = block_squares(k, [=](u32 i) { return x[i]; });
  if (threadIdx.x == 0) out[(u64)blockIdx.x * out_stride] = sum;
}

#define MAX_STREAMS 8

// Coefficients of one row, by one warp: pre, post, comb (row i: stream i into stream j) in shared memory. N is the number
// of streams where it is known when this is compiled: then chains are side by side.
template <u32 N>
DEVICE void coefficients(
    const float* dots, u32 width, u32 streams, u32 steps, const float* base, const float* scale, float rms_eps, float hc_eps,
    float* pre, float* post, float* comb) {
  const u32 n = N > 0 ? N : streams, mixes = (2 + n) * n;
  float r = div_rn(1.0f, sqrt_rn(div_rn(dots[mixes], (float)width) + rms_eps));
  u32 l = lane();
  if (l < n) {
    pre[l] = sigmoid_of(fma_rn(dots[l] * r, scale[0], base[l])) + hc_eps;
    post[l] = 2.0f * sigmoid_of(fma_rn(dots[n + l] * r, scale[1], base[n + l]));
  }
  // A lane a row of comb: its softmax, in order.
  if (l < n) {
    float row[N > 0 ? N : MAX_STREAMS], top = -infinity(), total = 0.0f;
#pragma unroll
    for (u32 j = 0; j < (N > 0 ? N : MAX_STREAMS); j++) {
      if (j < n) {
        u32 i = 2 * n + l * n + j;
        row[j] = fma_rn(dots[i] * r, scale[2], base[i]);
        top = row[j] > top ? row[j] : top;
      }
    }
#pragma unroll
    for (u32 j = 0; j < (N > 0 ? N : MAX_STREAMS); j++) {
      if (j < n) {
        row[j] = exp_of(row[j] - top);
        total = total + row[j];
      }
    }
#pragma unroll
    for (u32 j = 0; j < (N > 0 ? N : MAX_STREAMS); j++) {
      if (j < n) comb[l * n + j] = div_rn(row[j], total) + hc_eps;
    }
  }
  __syncwarp();
  // Columns and rows in turn; a lane holds its element and adds the others of its column or row in order.
  if (n * n <= 32) {
    float mine = l < n * n ? comb[l] : 0.0f;
    u32 column = l % n, row = l / n * n;
#pragma unroll 2
    for (u32 turn = 0; turn + 1 < 2 * steps; turn++) {
      float total = 0.0f;
#pragma unroll
      for (u32 i = 0; i < (N > 0 ? N : MAX_STREAMS); i++) {
        if (i < n) total = total + __shfl_sync(ALL, mine, turn % 2 == 0 ? i * n + column : row + i);
      }
      mine = div_rn(mine, total + hc_eps);
    }
    if (l < n * n) comb[l] = mine;
    return;
  }
  for (u32 turn = 0; turn + 1 < 2 * steps; turn++) {
    bool columns = turn % 2 == 0;
    float mine[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      u32 e = l + 32 * half;
      if (e < n * n) {
        const float* first = columns ? comb + e % n : comb + e / n * n;
        u32 stride = columns ? n : 1;
        float total = 0.0f;
        for (u32 i = 0; i < n; i++) total = total + first[i * stride];
        mine[half] = div_rn(comb[e], total + hc_eps);
      }
    }
    __syncwarp();
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      if (l + 32 * half < n * n) comb[l + 32 * half] = mine[half];
    }
    __syncwarp();
  }
}

#define FINISH_THREADS 512
// Streams whose numbers are fetched before the coefficients are there.
#define EARLY 4

// What a block reads: the streams collapsed and normed, and the coefficients for `hc.post`. The first FETCHED numbers of
// each thread stay in registers from the fetch to the end.
KERNEL THREADS(512) hc_finish(
    const float* dots, u32 dots_stride, const float* x, u32 x_stride, const float* base, const float* scale,
    const float* norm, float rms_eps, float hc_eps, u32 n, u32 d, u32 steps, float* h, u32 h_stride, float* post,
    u32 post_stride, float* comb, u32 comb_stride) {
  SHARED float s_pre[MAX_STREAMS], s_post[MAX_STREAMS], s_comb[MAX_STREAMS * MAX_STREAMS];
  const u32 held = FETCHED * FINISH_THREADS;
  u64 row = blockIdx.x;
  dots += row * dots_stride;
  x += row * x_stride;
  h += row * h_stride;
  float early[FETCHED][EARLY], sums[FETCHED], weights[FETCHED];
#pragma unroll
  for (u32 j = 0; j < FETCHED; j++) {
    u32 i = threadIdx.x + j * FINISH_THREADS;
    weights[j] = i < d ? norm[i] : 0.0f;
    sums[j] = 0.0f;
#pragma unroll
    for (u32 s = 0; s < EARLY; s++) early[j][s] = n == EARLY && i < d ? x[(u64)s * d + i] : 0.0f;
  }
  if (warp() == 0) {
    if (n == EARLY) coefficients<EARLY>(dots, n * d, n, steps, base, scale, rms_eps, hc_eps, s_pre, s_post, s_comb);
    else coefficients<0>(dots, n * d, n, steps, base, scale, rms_eps, hc_eps, s_pre, s_post, s_comb);
  }
  __syncthreads();
  if (threadIdx.x < n) post[row * post_stride + threadIdx.x] = s_post[threadIdx.x];
  if (threadIdx.x < n * n) comb[row * comb_stride + threadIdx.x] = s_comb[threadIdx.x];
  float r = rms_factor(
      block_squares_at(
          d,
          [&](u32 i, u32 j) {
            float sum = 0.0f;
            if (n == EARLY && i < held) {
#pragma unroll
              for (u32 s = 0; s < EARLY; s++) sum = fma_rn(s_pre[s], early[j][s], sum);
            } else {
              for (u32 s = 0; s < n; s++) sum = fma_rn(s_pre[s], x[(u64)s * d + i], sum);
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
  u64 row = blockIdx.x;
  u32 i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= d) return;
  x += row * x_stride;
  parts += row * parts_stride;
  post += row * post_stride;
  comb += row * comb_stride;
  out += row * out_stride;
  float y = parts[i];
  for (u32 p = 1; p < count; p++) y = y + parts[(u64)p * d + i];
  float streams[MAX_STREAMS];
#pragma unroll
  for (u32 s = 0; s < MAX_STREAMS; s++) streams[s] = s < n ? x[(u64)s * d + i] : 0.0f;
  for (u32 j = 0; j < n; j++) {
    float sum = post[j] * y;
#pragma unroll
    for (u32 s = 0; s < MAX_STREAMS; s++) {
      if (s < n) sum = fma_rn(comb[s * n + j], streams[s], sum);
    }
    out[(u64)j * d + i] = sum;
  }
}
