// Latent attention in per-head form: `mla.dense` and `mla.sparse`, and the same within the frames of an image (`vision.attend`).
//
// A cache row is, head by head, d channels of the key and then v of the value. Keys come in tiles of 16, four of them a stretch. Per row and head,
// tile by tile: scores; if the largest score so far grew, what was summed is scaled down; the numerators are added to
// their sum; each channel of the output is continued by a chain of multiply-adds over the tile's keys in order. At the end
// it is divided by the sum. That order is all that decides a row's bits, not the rows that share a block.
// Bound: the bytes of the keys and values, once a block; the rate of multiply-adds where 16 rows share them.

#define KEYS 16
// Keys whose scores are made at once.
#define STRETCH 64
#define ATTEND_THREADS 256

// Rows `first ..` of a call, at most R, that are rows of one sequence, one after another. None: nothing to do.
struct Block {
  u32 first, count, seq;
};

// A row starts a block where it is its sequence's first in the call, or a multiple of R rows after that.
template <u32 R> DEVICE Block block_of(const Round* round, u32 first_row, u32 rows, u32 index) {
  u32 seq = round->row_seq[first_row + index];
  u32 start = round->seq_first[seq], end = start + round->seq_rows[seq];
  start = start > first_row ? start : first_row;
  end = low(end, first_row + rows);
  u32 at = first_row + index;
  if ((at - start) % R != 0) return {index, 0, seq};
  return {index, low(R, end - at), seq};
}

// Scores of a stretch: `p[key][row]`. A warp takes R rows and eight keys; its lanes share the channels.
template <u32 R>
DEVICE void stretch_scores(const float* q, u64 q_stride, u32 count, const float* const* keys, u32 d, float scale, float (*p)[R]) {
  const u32 each = STRETCH / (ATTEND_THREADS / 32);
  u32 first = warp() * each;
  float sum[R * each];
#pragma unroll
  for (u32 i = 0; i < R * each; i++) sum[i] = 0.0f;
#pragma unroll (R == 1 ? 8 : R == 4 ? 4 : 2)
  for (u32 i = lane(); i < (d + 31) / 32 * 32; i += 32) {
    bool there = i < d;
    float k[each];
#pragma unroll
    for (u32 e = 0; e < each; e++) k[e] = there ? keys[first + e][i] : 0.0f;
#pragma unroll
    for (u32 r = 0; r < R; r++) {
      float x = there && r < count ? q[r * q_stride + i] : 0.0f;
#pragma unroll
      for (u32 e = 0; e < each; e++) sum[r * each + e] = fma_rn(x, k[e], sum[r * each + e]);
    }
  }
  tree_many(sum);
  // With fewer sums than lanes, several lanes have the same.
  const u32 held = R * each > 32 ? R * each / 32 : 1;
#pragma unroll
  for (u32 i = 0; i < held; i++) {
    u32 at = many_index<R * each>(lane()) + i;
    p[first + at % each][at / each] = sum[i] * scale;
  }
}

// What R rows make of a stretch: numerators, factors for what was summed before each tile, and sums of numerators. Keys and
// tiles first, so that the numbers of all rows are fetched together.
template <u32 R> struct alignas(16) Stretch {
  float p[STRETCH][R], shrink[STRETCH / KEYS][R], sum[R];
};

template <u32 R> DEVICE void attend(const Round* round, const Attend& o, const Cache& cache) {
  const u32 tiles = STRETCH / KEYS;
  SHARED Stretch<R> s_stretch;
  auto& s_p = s_stretch.p;
  auto& s_shrink = s_stretch.shrink;
  auto& s_sum = s_stretch.sum;
  SHARED const float* s_keys[STRETCH];
  SHARED u32 s_wrong;
  Block block = block_of<R>(round, o.first_row, o.rows, blockIdx.x);
  if (block.count == 0) return;
  u32 head = blockIdx.y, width = o.d + o.v;
  u32 slot = o.whole ? round->seq_first[block.seq] - o.first_row : round->seq_slot[block.seq], parity = round->seq_parity[block.seq];
  u32 position = round->positions[o.first_row + block.first];
  const float* q = o.q + block.first * o.q_stride + head * o.d;
  const i32* list = o.lists ? o.lists + block.first * o.lists_stride : nullptr;
  u32 seen = list ? (u32)o.counts[block.first * o.counts_stride] : o.whole ? round->seq_rows[block.seq] : position + 1;
  // Keys that a row sees more than the one before it.
  const u32 more = o.whole ? 0 : 1;
  // A list that is empty, too long or goes past the row reads nothing that is not the row's: it gives no numbers.
  bool wrong = list && (seen == 0 || seen > o.longest);
  if (wrong) seen = 1;
  if (threadIdx.x == 0) s_wrong = wrong;
  __syncthreads();
  u32 longest = list || o.whole ? seen : position + block.count;
  const float* base = cache.row(slot, parity, 0) + head * width;
  u64 stride = cache.row_bytes / 4;
  // Warp r keeps the largest score and the sum of row r; thread c has channels c and c + 256 of all rows.
  float top = -infinity(), total = 0.0f;
  float acc[2][R];
#pragma unroll
  for (u32 r = 0; r < R; r++) acc[0][r] = acc[1][r] = 0.0f;
  for (u32 first = 0; first < longest; first += STRETCH) {
    if (threadIdx.x < STRETCH) {
      u32 at = low(first + threadIdx.x, longest - 1);
      u32 key = list ? (u32)list[at] : at;
      if (list && key > position) {
        key = 0;
        s_wrong = 1;
      }
      s_keys[threadIdx.x] = base + key * stride;
    }
    __syncthreads();
    // Few rows: values are fetched before the scores are made, so that they are there when they are needed.
    float early[R <= 4 ? STRETCH : 1];
    if constexpr (R <= 4) {
#pragma unroll
      for (u32 j = 0; j < STRETCH; j++) early[j] = threadIdx.x < o.v ? s_keys[j][o.d + threadIdx.x] : 0.0f;
    }
    stretch_scores<R>(q, o.q_stride, block.count, s_keys, o.d, o.scale, s_p);
    __syncthreads();
    if (warp() < R) {
      // All four tiles side by side: only the largest scores depend on the tiles before.
      u32 r = warp(), mine[tiles];
      float score[tiles], best[tiles], shrink[tiles], sum[tiles];
#pragma unroll
      for (u32 t = 0; t < tiles; t++) {
        u32 from = first + t * KEYS;
        mine[t] = seen + r * more > from ? low(KEYS, seen + r * more - from) : 0;
        score[t] = best[t] = lane() < mine[t] ? s_p[t * KEYS + lane()][r] : -infinity();
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
        for (u32 t = 0; t < tiles; t++) {
          float other = __shfl_xor_sync(ALL, best[t], mask);
          best[t] = other > best[t] ? other : best[t];
        }
      }
#pragma unroll
      for (u32 t = 0; t < tiles; t++) {
        float now = best[t] > top ? best[t] : top;
        shrink[t] = exp_of(top - now);
        if (mine[t] > 0) top = now;
        float number = lane() < mine[t] ? exp_of(score[t] - now) : 0.0f;
        if (mine[t] > 0 && lane() < KEYS) s_p[t * KEYS + lane()][r] = number;
        sum[t] = number;
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
        for (u32 t = 0; t < tiles; t++) sum[t] = sum[t] + __shfl_xor_sync(ALL, sum[t], mask);
      }
#pragma unroll
      for (u32 t = 0; t < tiles; t++) {
        if (mine[t] > 0) total = fma_rn(total, shrink[t], sum[t]);
        if (lane() == 0) s_shrink[t][r] = mine[t] > 0 ? shrink[t] : 1.0f;
      }
      if (lane() == 0) s_sum[r] = total;
    }
    __syncthreads();
#pragma unroll
    for (u32 turn = 0; turn < 2; turn++) {
      u32 c = threadIdx.x + turn * ATTEND_THREADS;
      if (c >= o.v) continue;
#pragma unroll
      for (u32 t = 0; t < tiles; t++) {
        // Beyond the last key the last one is fetched again, and not used.
        float values[KEYS];
#pragma unroll
        for (u32 j = 0; j < KEYS; j++) {
          if constexpr (R <= 4) values[j] = turn == 0 ? early[t * KEYS + j] : s_keys[t * KEYS + j][o.d + c];
          else values[j] = s_keys[t * KEYS + j][o.d + c];
        }
        // Once is exact: a factor of one changes nothing.
#pragma unroll
        for (u32 r = 0; r < R; r++) acc[turn][r] = acc[turn][r] * s_shrink[t][r];
        // The first row sees the fewest keys.
        if (first + (t + 1) * KEYS <= seen) {
#pragma unroll
          for (u32 j = 0; j < KEYS; j++) {
#pragma unroll
            for (u32 r = 0; r < R; r++) acc[turn][r] = fma_rn(s_p[t * KEYS + j][r], values[j], acc[turn][r]);
          }
        } else {
#pragma unroll
          for (u32 j = 0; j < KEYS; j++) {
            u32 at = t * KEYS + j;
#pragma unroll
            for (u32 r = 0; r < R; r++) {
              if (first + at < seen + r * more) acc[turn][r] = fma_rn(s_p[at][r], values[j], acc[turn][r]);
            }
          }
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (u32 turn = 0; turn < 2; turn++) {
    u32 c = threadIdx.x + turn * ATTEND_THREADS;
    if (c < o.v) {
#pragma unroll
      for (u32 r = 0; r < R; r++) {
        float value = acc[turn][r] * div_rn(1.0f, s_sum[r]);
        if (r < block.count) o.out[(block.first + r) * o.out_stride + head * o.v + c] = s_wrong ? float_of(0x7fc00000u) : value;
      }
    }
  }
}

KERNEL THREADS(256) mla_attend_1(const Round* round, Attend o, Cache cache) { attend<1>(round, o, cache); }
KERNEL THREADS(256) mla_attend_4(const Round* round, Attend o, Cache cache) { attend<4>(round, o, cache); }
KERNEL THREADS(256) mla_attend_8(const Round* round, Attend o, Cache cache) { attend<8>(round, o, cache); }
