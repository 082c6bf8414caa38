// Attention of many rows: `mla.dense` of a prompt's piece, `vision.attend`. Bit for bit what mla.cu makes of fewer rows.
//
// A block is a head and 32 rows of a sequence; keys come 32 at a time. A thread makes whole scores, of four rows with two keys: the
// 32 partial sums of a score one after another, in an order in which each is added to its neighbour of the tree as soon
// as both are there, so that no sum moves between lanes and few are held. For that, queries and keys lie in shared memory with
// four channels of the same partial sum side by side. Then a thread makes half of a tile's numerators of a row, and at last
// it continues the chains of some rows and channels over the keys.
// Bound: the rate of multiply-adds.

#define MANY 32
#define SPAN 32
#define TILE 16
#define TILES (SPAN / TILE)
#define MANY_THREADS 128
// Blocks of wide heads that fit a multiprocessor's shared memory: three in 228 KiB, one in 100.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define WIDE_BLOCKS 1
#else
#define WIDE_BLOCKS 3
#endif
// From a key's scores to the next's: rows of a thread are fetched as one, and no two lanes store to the same bank.
#define SCORE_PITCH (MANY + 4)
// Rows and keys of a thread's scores.
#define OWN_ROWS 4
#define OWN_KEYS 2
#define OWN (OWN_ROWS * OWN_KEYS)

// The rows of the block: `first ..` of the call, `count` of them, of sequence `seq`. Blocks are counted along the sequences. None
// where there are more blocks than that.
struct Place {
  u32 first, count, seq;
};

DEVICE Place place_of(const Round* round, u32 first_row, u32 rows, u32 index) {
  for (u32 base = round->row_seq[first_row]; base < round->seqs; base += 32) {
    u32 seq = base + lane(), start = 0, end = 0;
    if (seq < round->seqs) {
      start = round->seq_first[seq];
      end = low(start + round->seq_rows[seq], first_row + rows);
      start = start > first_row ? start : first_row;
    }
    u32 blocks = end > start ? (end - start + MANY - 1) / MANY : 0, sum = blocks;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      u32 before = __shfl_up_sync(ALL, sum, step);
      if (lane() >= step) sum += before;
    }
    u32 found = __reduce_min_sync(ALL, index < sum ? lane() : 32);
    if (found < 32) {
      u32 at = start + (index - (sum - blocks)) * MANY;
      u32 first = __shfl_sync(ALL, at, found), last = __shfl_sync(ALL, end, found);
      return {first - first_row, low(MANY, last - first), base + found};
    }
    index -= __shfl_sync(ALL, sum, 31);
  }
  return {0, 0, 0};
}

// Where channels lie in a row of D in shared memory, four of them side by side. Up to 64: l, l + 32, l + 16, l + 48 for partial
// sums l and l + 16. Up to 256: l, l + 32, l + 64, l + 96, the channels from 128 on behind them all.
template <u32 D> DEVICE u32 channel_at(u32 four, u32 which) {
  if (D == 64) return four + which / 2 * 16 + which % 2 * 32;
  return four / 32 * 128 + four % 32 + which * 32;
}

// Fetches rows of d channels: `count` of 32, zeros for the others and beyond d.
template <u32 D> DEVICE void fetch_rows(float* to, const float* from, u64 stride, u32 count, u32 d) {
  const u32 warps = MANY_THREADS / 32;
  // Eight fours a warp: pieces of 32 bytes of global memory, and 32 banks.
  u32 which = lane() / 8, own = channel_at<D>(lane() % 8, which);
  to += warp() * (D + 4) + lane() % 8 * 4 + which;
  if (count == MANY && d == D) {
    from += warp() * stride + own;
#pragma unroll 2
    for (u32 i = 0; i < MANY / warps; i++) {
#pragma unroll
      for (u32 four = 0; four < D / 4; four += 8) copy_async_one(to + four * 4, from + channel_at<D>(four, 0), true);
      to += warps * (D + 4);
      from += warps * stride;
    }
    return;
  }
#pragma unroll 1
  for (u32 row = warp(); row < MANY; row += warps) {
    const float* x = from + (u64)low(row, count - 1) * stride;
#pragma unroll 1
    for (u32 four = 0; four < D / 4; four += 8) {
      u32 channel = channel_at<D>(four, 0) + own;
      bool there = row < count && channel < d;
      copy_async_one(to + four * 4, x + (there ? channel : 0), there);
    }
    to += warps * (D + 4);
  }
}

// Fetches the values of `count` keys, v channels each.
template <u32 V> DEVICE void fetch_values(float* to, const float* from, u64 stride, u32 count, u32 v) {
  bool quads = (((u64)from | stride * 4 | v * 4) & 15) == 0;
  if (quads && count == SPAN && v == V) {
    const u32 keys = MANY_THREADS * 4 / V;
    to += threadIdx.x * 4;
    from += threadIdx.x / (V / 4) * stride + threadIdx.x % (V / 4) * 4;
#pragma unroll 4
    for (u32 i = 0; i < SPAN / keys; i++) {
      copy_async(to, from);
      to += keys * V;
      from += keys * stride;
    }
  } else if (quads) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < SPAN * V / 4; i += MANY_THREADS) {
      u32 key = i / (V / 4), c = i % (V / 4) * 4;
      if (key < count && c < v) copy_async(to + key * V + c, from + key * stride + c);
    }
  } else {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < SPAN * V; i += MANY_THREADS) {
      u32 key = i / V, c = i % V;
      if (key < count && c < v) copy_async_one(to + i, from + key * stride + c, true);
    }
  }
}

DEVICE void multiply(const Float4 (&q)[OWN_ROWS], const Float4 (&k)[OWN_KEYS], u32 e, float (&sum)[OWN]) {
#pragma unroll
  for (u32 i = 0; i < OWN; i++) sum[i] = fma_rn(q[i / OWN_KEYS].v[e], k[i % OWN_KEYS].v[e], sum[i]);
}

// Sums of the N partial sums (with D = 64, pairs of them) from `four` on, STEP fours apart, in the order of the tree.
template <u32 D, u32 N, u32 STEP> DEVICE void partial_sums(const float* q, const float* k, u32 four, float (&sum)[OWN]) {
  float other[OWN];
  if constexpr (N > 1) {
    partial_sums<D, N / 2, 2 * STEP>(q, k, four, sum);
    partial_sums<D, N / 2, 2 * STEP>(q, k, four + STEP, other);
  } else {
    Float4 x[OWN_ROWS], y[OWN_KEYS];
#pragma unroll
    for (u32 i = 0; i < OWN; i++) sum[i] = other[i] = 0.0f;
#pragma unroll
    for (u32 half = 0; half < (D == 64 ? 1 : 2); half++) {
#pragma unroll
      for (u32 r = 0; r < OWN_ROWS; r++) x[r] = *(const Float4*)(q + r * 4 * (D + 4) + four * 4 + half * 128);
#pragma unroll
      for (u32 j = 0; j < OWN_KEYS; j++) y[j] = *(const Float4*)(k + j * 8 * (D + 4) + four * 4 + half * 128);
#pragma unroll
      for (u32 e = 0; e < 4; e++) multiply(x, y, e, D == 64 && e >= 2 ? other : sum);
    }
  }
  if constexpr (N > 1 || D == 64) {
#pragma unroll
    for (u32 i = 0; i < OWN; i++) sum[i] = sum[i] + other[i];
  }
}

// Where a thread's scores lie, from the first of them.
DEVICE u32 score_at(u32 i) { return i % OWN_KEYS * 8 * SCORE_PITCH + i / OWN_KEYS * 4; }

// Scores of the block's rows with 32 keys. A warp has 16 rows and 16 keys. Of neighbouring lanes two have the same key and two
// the same rows: such fetches of 16 bytes are two at a time.
template <u32 D> DEVICE void span_scores(const float* q, const float* k, float scale, float* p) {
  u32 l = lane(), row = warp() % 2 * 16 + l % 2 + l / 16 * 2, key = warp() / 2 * 16 + l / 2 % 8;
  q += row * (D + 4);
  k += key * (D + 4);
  p += key * SCORE_PITCH + row;
  if constexpr (D == 64) {
    float sum[OWN];
    partial_sums<64, 16, 1>(q, k, 0, sum);
#pragma unroll
    for (u32 i = 0; i < OWN; i++) p[score_at(i)] = sum[i] * scale;
  } else {
    // To save registers every fourth partial sum at a time: 0 and 2, which are added, then 1 and 3. What they give waits in shared
    // memory.
    const u32 odd = SPAN * SCORE_PITCH;
#pragma unroll 1
    for (u32 turn = 0; turn < 4; turn++) {
      float sum[OWN];
      u32 four = turn % 2 * 2 + turn / 2;
      partial_sums<D, 8, 4>(q + four * 4, k + four * 4, 0, sum);
#pragma unroll
      for (u32 i = 0; i < OWN; i++) {
        float* at = p + turn / 2 * odd + score_at(i);
        *at = turn % 2 ? *at + sum[i] : sum[i];
      }
    }
#pragma unroll
    for (u32 i = 0; i < OWN; i++) p[score_at(i)] = (p[score_at(i)] + p[score_at(i) + odd]) * scale;
  }
}

// What lies in shared memory, in numbers. With wide heads values take the place of the keys.
template <u32 D, u32 V> struct Plan {
  static const u32 q = 0, k = q + MANY * (D + 4), apart = D == 64, v = apart ? k + SPAN * (D + 4) : k;
  static const u32 p = apart ? v + SPAN * V : k + SPAN * (D + 4), best = p + 2 * SPAN * SCORE_PITCH;
  static const u32 shrink = best + TILES * MANY, sum = shrink + TILES * MANY, total = sum + TILES * MANY;
};

template <u32 D, u32 V> DEVICE void attend_many(const Round* round, const Attend& o, const Cache& cache) {
  typedef Plan<D, V> At;
  SHARED_BYTES(bytes);
  float* shared = (float*)bytes;
  float *s_q = shared + At::q, *s_k = shared + At::k, *s_v = shared + At::v, *s_p = shared + At::p, *s_best = shared + At::best;
  float *s_shrink = shared + At::shrink, *s_sum = shared + At::sum, *s_total = shared + At::total;
  Place block = place_of(round, o.first_row, o.rows, blockIdx.x);
  if (block.count == 0) return;
  u32 head = blockIdx.y, width = o.d + o.v;
  u32 slot = o.whole ? round->seq_first[block.seq] - o.first_row : round->seq_slot[block.seq], parity = round->seq_parity[block.seq];
  // Keys that the first row sees, and how many each row sees more than the one before it.
  u32 seen = o.whole ? round->seq_rows[block.seq] : round->positions[o.first_row + block.first] + 1, more = o.whole ? 0 : 1;
  u32 longest = seen + (block.count - 1) * more;
  const float* base = cache.row(slot, parity, 0) + head * width;
  // Fits: heads are fewer than 65,536, of 512 numbers at most.
  u32 stride = (u32)(cache.row_bytes / 4);
  auto fetch_keys = [&](u32 first) { fetch_rows<D>(s_k, base + (u64)first * stride, stride, low(SPAN, longest - first), o.d); };
  auto fetch_span_values = [&](u32 first) {
    fetch_values<V>(s_v, base + (u64)first * stride + o.d, stride, low(SPAN, longest - first), o.v);
    copy_commit();
  };
  fetch_rows<D>(s_q, o.q + block.first * o.q_stride + head * o.d, o.q_stride, block.count, o.d);
  if (At::apart) fetch_keys(0);
  copy_commit();

  // A thread's part of a row's numerators: tile `tile`, keys 4 `half` to 4 `half` + 3 and those eight further.
  u32 row = lane() % 16 + warp() % 2 * 16, half = lane() / 16, tile = warp() / 2;
  float top = -infinity();
  // Its part of the outputs.
  const u32 rows = V > 64 ? 8 : 4, quads = V > 64 ? 2 : 1;
  u32 own_row = warp() * 8 + (V > 64 ? 0 : lane() / 16 * 4), own_channel = (V > 64 ? lane() : lane() % 16) * 4;
  float acc[rows][quads * 4];
#pragma unroll
  for (u32 r = 0; r < rows; r++) {
#pragma unroll
    for (u32 c = 0; c < quads * 4; c++) acc[r][c] = 0.0f;
  }

  for (u32 first = 0; first < longest; first += SPAN) {
    if constexpr (At::apart) {
      fetch_span_values(first);
      copy_wait<1>();
    } else {
      fetch_keys(first);
      copy_commit();
      copy_wait<0>();
    }
    __syncthreads();
    span_scores<D>(s_q, s_k, o.scale, s_p);
    __syncthreads();
    if constexpr (At::apart) {
      if (first + SPAN < longest) fetch_keys(first + SPAN);
      copy_commit();
    } else {
      fetch_span_values(first);
    }

    auto keys_of = [&](u32 t) {
      u32 sees = seen + row * more, from = first + t * TILE;
      return sees > from ? low(TILE, sees - from) : 0;
    };
    u32 mine = keys_of(tile);
    float* p = s_p + tile * TILE * SCORE_PITCH + row;
    float number[8], best = -infinity();
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      u32 j = i % 4 + half * 4 + i / 4 * 8;
      number[i] = j < mine ? p[j * SCORE_PITCH] : -infinity();
      best = number[i] > best ? number[i] : best;
    }
    float other = __shfl_xor_sync(ALL, best, 16);
    best = other > best ? other : best;
    s_best[tile * MANY + row] = best;
    __syncthreads();
    // The largest before the tile and with it.
    float before = top, now = top;
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
      float tiles = s_best[t * MANY + row];
      if (keys_of(t) > 0) top = tiles > top ? tiles : top;
      if (t < tile) before = top;
      if (t == tile) now = top;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      u32 j = i % 4 + half * 4 + i / 4 * 8;
      float e = exp_of(number[i] - now);
      number[i] = j < mine ? e : 0.0f;
      p[j * SCORE_PITCH] = number[i];
    }
    float sum[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      sum[i] = number[i] + number[i + 4];
      sum[i] = sum[i] + __shfl_xor_sync(ALL, sum[i], 16);
    }
    if (half == 0) {
      s_sum[tile * MANY + row] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
      s_shrink[tile * MANY + row] = mine > 0 ? exp_of(before - now) : 1.0f;
    }
    if constexpr (At::apart) copy_wait<1>();
    else copy_wait<0>();
    __syncthreads();
    if (tile == 0 && half == 0) {
      float total = first > 0 ? s_total[row] : 0.0f;
#pragma unroll
      for (u32 t = 0; t < TILES; t++) {
        if (keys_of(t) > 0) total = fma_rn(total, s_shrink[t * MANY + row], s_sum[t * MANY + row]);
      }
      s_total[row] = total;
    }
#pragma unroll 1
    for (u32 t = 0; t < TILES; t++) {
      const float *factors = s_shrink + t * MANY + own_row, *numbers = s_p + t * TILE * SCORE_PITCH + own_row;
      const float* values = s_v + t * TILE * V + own_channel;
      // Once is exact: a factor of one changes nothing.
#pragma unroll
      for (u32 r = 0; r < rows; r++) {
#pragma unroll
        for (u32 c = 0; c < quads * 4; c++) acc[r][c] = acc[r][c] * factors[r];
      }
      auto add = [&](u32 j, auto sees) {
        Float4 n[rows / 4], x[quads];
#pragma unroll
        for (u32 i = 0; i < rows / 4; i++) n[i] = *(const Float4*)(numbers + j * SCORE_PITCH + i * 4);
#pragma unroll
        for (u32 i = 0; i < quads; i++) x[i] = *(const Float4*)(values + j * V + i * 128);
#pragma unroll
        for (u32 r = 0; r < rows; r++) {
          if (!sees(r)) continue;
#pragma unroll
          for (u32 c = 0; c < quads * 4; c++) acc[r][c] = fma_rn(n[r / 4].v[r % 4], x[c / 4].v[c % 4], acc[r][c]);
        }
      };
      u32 from = first + t * TILE;
      // The first row sees the fewest keys.
      if (from + TILE <= seen) {
#pragma unroll 8
        for (u32 j = 0; j < TILE; j++) add(j, [](u32) { return true; });
      } else {
#pragma unroll 1
        for (u32 j = 0; j < TILE; j++) add(j, [&](u32 r) { return from + j < seen + (own_row + r) * more; });
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (u32 r = 0; r < rows; r++) {
    if (own_row + r >= block.count) continue;
    float inverse = div_rn(1.0f, s_total[own_row + r]);
    float* out = o.out + (block.first + own_row + r) * o.out_stride + head * o.v;
#pragma unroll
    for (u32 c = 0; c < quads * 4; c++) {
      u32 channel = own_channel + c / 4 * 128 + c % 4;
      if (channel < o.v) out[channel] = acc[r][c] * inverse;
    }
  }
}

KERNEL THREADS(128, 4) attend_many_64(const Round* round, Attend o, Cache cache) { attend_many<64, 64>(round, o, cache); }
KERNEL THREADS(128, WIDE_BLOCKS) attend_many_256(const Round* round, Attend o, Cache cache) { attend_many<256, 256>(round, o, cache); }
