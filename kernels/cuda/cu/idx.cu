// The sparse indexer: `idx.write` and `idx.select`.

// Token rows [normed key | gate] at the rows' positions; the norm takes the mean away. A warp a row.
// Bound: the bytes of the rows.
KERNEL THREADS(128) idx_tokens(
    const Round* round, u32 first_row, u32 rows, const float* key, u32 key_stride, const float* gate, u32 gate_stride,
    const float* weight, const float* bias, float eps, u32 d, Cache tokens) {
  u32 row = blockIdx.x * 4 + warp();
  if (row >= rows) return;
  u32 seq = round->row_seq[first_row + row];
  float* out = tokens.row(round->seq_slot[seq], round->seq_parity[seq], round->positions[first_row + row]);
  key += (u64)row * key_stride;
  gate += (u64)row * gate_stride;
  float sum = 0.0f;
  // One stretch more than there are whole ones, as the reference adds them.
  for (u32 i = lane(); i < d / 32 * 32 + 32; i += 32) sum = sum + (i < d ? key[i] : 0.0f);
  float mean = div_rn(tree(sum), (float)d), square = 0.0f;
  for (u32 i = lane(); i < (d + 31) / 32 * 32; i += 32) {
    float v = i < d ? key[i] - mean : 0.0f;
    square = fma_rn(v, v, square);
  }
  float inverse = div_rn(1.0f, sqrt_rn(div_rn(tree(square), (float)d) + eps));
  for (u32 i = lane(); i < d; i += 32) {
    out[i] = fma_rn((key[i] - mean) * inverse, weight[i], bias[i]);
    out[d + i] = gate[i];
  }
}

#define MAX_POOL 16

// Keys of the pools that rows of the call complete. A block a row, which works if its position ends a pool; a thread a
// channel. Bound: the bytes of the pool's token rows.
KERNEL THREADS(128) idx_pools(const Round* round, u32 first_row, const float* ape, u32 d, u32 pool, Cache tokens, Cache pools) {
  u32 row = first_row + blockIdx.x, seq = round->row_seq[row], position = round->positions[row];
  if ((position + 1) % pool != 0) return;
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq], b = position / pool;
  float* out = pools.row(slot, parity, b);
  for (u32 c = threadIdx.x; c < d; c += blockDim.x) {
    float share[MAX_POOL], top = -infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < MAX_POOL; j++) {
      if (j < pool) {
        share[j] = tokens.row(slot, parity, (u64)b * pool + j)[d + c] + ape[j * d + c];
        top = share[j] > top ? share[j] : top;
      }
    }
#pragma unroll
    for (u32 j = 0; j < MAX_POOL; j++) {
      if (j < pool) {
        share[j] = exp_of(share[j] - top);
        total = total + share[j];
      }
    }
#pragma unroll
    for (u32 j = 0; j < MAX_POOL; j++) {
      if (j < pool) sum = fma_rn(div_rn(share[j], total), tokens.row(slot, parity, (u64)b * pool + j)[c], sum);
    }
    out[c] = sum;
  }
}

#define POOLS 64

// Scores of pools for each row: sum over heads of w relu(q K). A block takes 64 pools of a row, a warp eight of them; a
// lane has a head and takes the channels in order. Heads come in panels of 16, two side by side; a lane of the first adds
// the panels in order, and the 16 lanes are added in halves. Bound: the bytes of the pool keys, or 2 * HI * dI operations
// a pool.
KERNEL THREADS(256) idx_scores(
    const Round* round, u32 first_row, const float* q, u32 q_stride, const float* w, u32 w_stride, u32 heads, u32 d, u32 pool,
    u32 budget, Cache pools, float* scores, u64 scores_stride) {
  SHARED_BYTES(shared);
  // [pool][channel], then [four channels][33 heads][4]; channels are filled up with zeros to a multiple of 4, which change
  // no sum.
  const u32 padded = (d + 3) / 4 * 4;
  float *s_pool = (float*)shared, *s_q = s_pool + POOLS * padded;
  u32 row = first_row + blockIdx.x, seq = round->row_seq[row], full = (round->positions[row] + 1) / pool;
  u32 first = blockIdx.y * POOLS;
  if (full <= budget || first >= full) return;
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq], count = low(POOLS, full - first);
  q += (u64)blockIdx.x * q_stride;
  w += (u64)blockIdx.x * w_stride;
  for (u32 p = warp(); p < count; p += 8) {
    const float* key = pools.row(slot, parity, first + p);
    float* to = s_pool + p * padded;
    if (d % 4 == 0 && (u64)key % 16 == 0) {
      for (u32 c = 4 * lane(); c < d; c += 128) copy_async(to + c, key + c);
    } else {
      for (u32 c = lane(); c < padded; c += 32) to[c] = c < d ? key[c] : 0.0f;
    }
  }
  copy_commit();
  float root = div_rn(1.0f, sqrt_rn((float)heads)), scale = div_rn(1.0f, sqrt_rn((float)d));
  float lanes[8];
#pragma unroll
  for (u32 p = 0; p < 8; p++) lanes[p] = 0.0f;
  for (u32 base = 0; base < heads; base += 32) {
    __syncthreads();
    for (u32 from = lane(); from < padded; from += 128) {
      // A warp's four heads and four stretches of channels: loads before stores.
      float x[4][4];
#pragma unroll
      for (u32 e = 0; e < 16; e++) {
        u32 h = base + warp() + e / 4 * 8, c = from + e % 4 * 32;
        x[e / 4][e % 4] = h < heads && c < d ? q[(u64)h * d + c] : 0.0f;
      }
#pragma unroll
      for (u32 e = 0; e < 16; e++) {
        u32 h = warp() + e / 4 * 8, c = from + e % 4 * 32;
        if (c < padded) s_q[(c / 4 * 33 + h) * 4 + c % 4] = x[e / 4][e % 4];
      }
    }
    copy_wait<0>();
    __syncthreads();
    u32 h = base + lane();
    float mine = h < heads ? w[h] * root : 0.0f, acc[8];
#pragma unroll
    for (u32 p = 0; p < 8; p++) acc[p] = 0.0f;
    const float* key = s_pool + warp() * 8 * padded;
#pragma unroll 2
    for (u32 c = 0; c < padded; c += 4) {
      Float4 x = *(const Float4*)(s_q + (c / 4 * 33 + lane()) * 4);
#pragma unroll
      for (u32 p = 0; p < 8; p++) {
        Float4 k = *(const Float4*)(key + p * padded + c);
#pragma unroll
        for (u32 j = 0; j < 4; j++) acc[p] = fma_rn(k.v[j], x.v[j], acc[p]);
      }
    }
    float upper = __shfl_down_sync(ALL, mine, 16);
#pragma unroll
    for (u32 p = 0; p < 8; p++) {
      float dot = acc[p] * scale;
      dot = dot > 0.0f ? dot : 0.0f;
      float next = __shfl_down_sync(ALL, dot, 16);
      lanes[p] = fma_rn(mine, dot, lanes[p]);
      if (base + 16 < heads) lanes[p] = fma_rn(upper, next, lanes[p]);
    }
  }
#pragma unroll
  for (u32 p = 0; p < 8; p++) {
    float v = lanes[p];
#pragma unroll
    for (u32 half = 8; half > 0; half /= 2) v = v + __shfl_down_sync(ALL, v, half);
    u32 at = warp() * 8 + p;
    if (lane() == 0 && at < count) scores[blockIdx.x * scores_stride + first + at] = v;
  }
}

// Positions that each row sees, ascending, then -1: the best pools (ties to the lower one) and the open pool's tokens; all
// positions where there are few enough. A block a row. Bound: the bytes of the scores, read five times.
KERNEL THREADS(1024) idx_select(
    const Round* round, u32 first_row, u32 pool, u32 budget, u32 longest, const float* scores, u64 scores_stride, i32* lists,
    u32 lists_stride, i32* counts, u32 counts_stride) {
  u32 row = first_row + blockIdx.x, visible = round->positions[row] + 1, full = visible / pool;
  i32* list = lists + (u64)blockIdx.x * lists_stride;
  const float* values = scores + blockIdx.x * scores_stride;
  u32 count = visible;
  if (full <= budget) {
    for (u32 i = threadIdx.x; i < visible; i += blockDim.x) list[i] = (i32)i;
  } else {
    count = budget * pool + visible - full * pool;
    Threshold t = threshold_of(full, budget, [=](u32 i) { return ordered(values[i]); });
    place_best(full, t, [=](u32 i) { return ordered(values[i]); }, [=](u32 place, u32 i) {
      for (u32 j = 0; j < pool; j++) list[place * pool + j] = (i32)(i * pool + j);
    });
    for (u32 i = threadIdx.x; i < visible - full * pool; i += blockDim.x) list[budget * pool + i] = (i32)(full * pool + i);
  }
  for (u32 i = count + threadIdx.x; i < longest; i += blockDim.x) list[i] = -1;
  if (threadIdx.x == 0) counts[(u64)blockIdx.x * counts_stride] = (i32)count;
}
