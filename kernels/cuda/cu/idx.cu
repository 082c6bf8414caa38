// The sparse indexer: `idx.write` and `idx.select`.

#define MAX_POOL 16

// Channels of a key that a lane holds: of keys up to 128 wide all are fetched at once, with what they are normed with.
#define HELD_CHANNELS 4

// The norm of a key, which takes the mean away, by a warp: element i goes to `put(i, value)`.
template <class F> DEVICE void normed_key(const float* key, const float* weight, const float* bias, float eps, u32 d, F put) {
  float held[HELD_CHANNELS], factor[HELD_CHANNELS], addend[HELD_CHANNELS], sum = 0.0f, square = 0.0f;
#pragma unroll
  for (u32 j = 0; j < HELD_CHANNELS; j++) {
    u32 i = low(lane() + 32 * j, d - 1);
    held[j] = key[i];
    factor[j] = weight[i];
    addend[j] = bias[i];
  }
  // One stretch more than there are whole ones, as the reference adds them.
  const u32 stretches = d / 32 + 1, whole = (d + 31) / 32;
#pragma unroll
  for (u32 j = 0; j < HELD_CHANNELS + 1; j++) {
    if (j < stretches) sum = sum + (lane() + 32 * j < d ? j < HELD_CHANNELS ? held[low(j, HELD_CHANNELS - 1)] : key[lane() + 32 * j] : 0.0f);
  }
  for (u32 i = lane() + 32 * (HELD_CHANNELS + 1); i < 32 * stretches; i += 32) sum = sum + (i < d ? key[i] : 0.0f);
  const float mean = div_rn(tree(sum), (float)d);
#pragma unroll
  for (u32 j = 0; j < HELD_CHANNELS; j++) {
    float v = lane() + 32 * j < d ? held[j] - mean : 0.0f;
    if (j < whole) square = fma_rn(v, v, square);
  }
  for (u32 i = lane() + 32 * HELD_CHANNELS; i < 32 * whole; i += 32) {
    float v = i < d ? key[i] - mean : 0.0f;
    square = fma_rn(v, v, square);
  }
  const float inverse = rms_factor(tree(square), d, eps);
#pragma unroll
  for (u32 j = 0; j < HELD_CHANNELS; j++) {
    if (lane() + 32 * j < d) put(lane() + 32 * j, fma_rn((held[j] - mean) * inverse, factor[j], addend[j]));
  }
  for (u32 i = lane() + 32 * HELD_CHANNELS; i < d; i += 32) put(i, fma_rn((key[i] - mean) * inverse, weight[i], bias[i]));
}

// Token rows [normed key | gate] at the rows' positions, and the keys of the pools that rows complete. A block a row. Where the
// row ends a pool, the block makes those of the pool's token rows that are of this call once more, a warp a row, and takes the
// others from the cache: nobody waits for another block. Bound: latency; at many rows the bytes of the rows.
KERNEL THREADS(128) idx_write(
    const Round* round, u32 first_row, const float* key, u32 key_stride, const float* gate, u32 gate_stride,
    const float* weight, const float* bias, const float* ape, float eps, u32 d, u32 pool, Cache tokens, Cache pools) {
  SHARED_BYTES(shared);
  // [token of the pool][key | gate].
  float* s_tokens = (float*)shared;
  u32 row = first_row + blockIdx.x, seq = round->row_seq[row], position = round->positions[row];
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq];
  const u32 place = position % pool;
  // Rows before this one that are of its sequence and of the call.
  u32 begin = round->seq_first[seq];
  begin = begin > first_row ? begin : first_row;
  const bool ends = place + 1 == pool;
  // A thread's first channel: fetched before anything is waited for.
  float apes[MAX_POOL];
#pragma unroll
  for (u32 j = 0; j < MAX_POOL; j++) apes[j] = ends && j < pool && threadIdx.x < d ? ape[j * d + threadIdx.x] : 0.0f;
  for (u32 j = ends ? warp() : place + warp(); j <= place; j += 4) {
    const u32 back = place - j;
    float* to = s_tokens + 2 * d * j;
    float* out = back == 0 ? tokens.row(slot, parity, position) : nullptr;
    if (row - begin >= back) {
      const u64 at = blockIdx.x - back;
      const float* from = gate + at * gate_stride;
      float gates[HELD_CHANNELS];
#pragma unroll
      for (u32 j = 0; j < HELD_CHANNELS; j++) gates[j] = from[low(lane() + 32 * j, d - 1)];
      auto put = [=](u32 i, float v) {
        to[i] = v;
        if (out) out[i] = v;
      };
      normed_key(key + at * key_stride, weight, bias, eps, d, put);
#pragma unroll
      for (u32 j = 0; j < HELD_CHANNELS; j++) {
        if (lane() + 32 * j < d) put(d + lane() + 32 * j, gates[j]);
      }
      for (u32 i = lane() + 32 * HELD_CHANNELS; i < d; i += 32) put(d + i, from[i]);
    } else {
      const float* from = tokens.row(slot, parity, position - back);
#pragma unroll 8
      for (u32 i = lane(); i < 2 * d; i += 32) to[i] = from[i];
    }
  }
  if (!ends) return;
  __syncthreads();
  float* out = pools.row(slot, parity, position / pool);
  for (u32 c = threadIdx.x; c < d; c += blockDim.x) {
    float share[MAX_POOL], top = -infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < MAX_POOL; j++) {
      if (j < pool) {
        share[j] = s_tokens[2 * d * j + d + c] + (c < blockDim.x ? apes[j] : ape[j * d + c]);
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
      if (j < pool) sum = fma_rn(div_rn(share[j], total), s_tokens[2 * d * j + c], sum);
    }
    out[c] = sum;
  }
}

#define POOLS 64
// Numbers from a pool to the next in shared memory, beyond its own: pools that are read together lie in different banks.
#define POOL_GAP 4
// Pools of a lane.
#define LANE_POOLS 2

// Scores of pools for each row, as keys that order like them: sum over heads of w relu(q K). A block takes 64 pools of a row, a warp all of them
// with every fourth head, so that the fetches of four channels of a lane's two pools and, the same for all lanes, of eight heads serve 64
// multiply-adds, and the channels in order. The sum over heads is that of 16 sums which have heads i, i + 16, .., added in halves: the last two
// additions are of the warps'. Bound: the bytes of the pool keys, or HI * dI multiply-adds a pool.
KERNEL THREADS(128) idx_scores(
    const Round* round, u32 first_row, const float* q, u32 q_stride, const float* w, u32 w_stride, u32 heads, u32 d, u32 pool,
    u32 budget, Cache pools, u32* keys, u64 keys_stride) {
  SHARED_BYTES(shared);
  // [pool][channel], then [four channels][33 heads][4], a warp's heads together; channels are filled up with zeros to a multiple of 4, which change
  // no sum.
  const u32 padded = (d + 3) / 4 * 4, apart = padded + POOL_GAP;
  float *s_pool = (float*)shared, *s_q = s_pool + POOLS * apart;
  u32 row = first_row + blockIdx.x, seq = round->row_seq[row], full = (round->positions[row] + 1) / pool;
  u32 first = blockIdx.y * POOLS;
  if (full <= budget || first >= full) return;
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq], count = low(POOLS, full - first);
  q += (u64)blockIdx.x * q_stride;
  w += (u64)blockIdx.x * w_stride;
  // Rows of d numbers that begin on multiples of 16 bytes come without passing through registers; of others number by number.
  auto bring = [=](float* to, const float* from, u32 c) {
    for (u32 j = 0; j < 4; j++) to[j] = c + j < d ? from[c + j] : 0.0f;
  };
  const float* key = pools.row(slot, parity, first);
  const u64 next = pools.row_bytes / 4;
  const bool whole = d % 4 == 0 && (u64)key % 16 == 0 && next % 4 == 0, whole_q = d % 4 == 0 && (u64)q % 16 == 0;
#pragma unroll 1
  for (u32 c = 4 * lane(); c < d; c += 128) {
    const float* from = key + warp() * next;
    float* to = s_pool + warp() * apart;
    if (whole) {
#pragma unroll 4
      for (u32 p = warp(); p < count; p += 4, from += 4 * next, to += 4 * apart) copy_async(to + c, from + c);
    } else {
#pragma unroll 1
      for (u32 p = warp(); p < count; p += 4, from += 4 * next, to += 4 * apart) bring(to + c, from, c);
    }
  }
  const float root = div_rn(1.0f, sqrt_rn((float)heads)), scale = div_rn(1.0f, sqrt_rn((float)d));
  SHARED float s_sums[4][POOLS];
  float sums[4][LANE_POOLS];
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
#pragma unroll
    for (u32 p = 0; p < LANE_POOLS; p++) sums[j][p] = 0.0f;
  }
#pragma unroll 1
  for (u32 base = 0; base < heads; base += 32) {
    __syncthreads();
    // Every block begins with another head, so that they do not all ask for the same line.
    const u32 turned = blockIdx.y % 32;
#pragma unroll 1
    for (u32 c = 4 * lane(); c < d; c += 128) {
      auto place = [=](u32 h) { return s_q + (c / 4 * 33 + h % 4 * 8 + h / 4) * 4; };
      if (whole_q && base + 32 <= heads) {
#pragma unroll 4
        for (u32 j = warp(); j < 32; j += 4) {
          u32 h = (j + turned) % 32;
          copy_async(place(h), q + (base + h) * d + c);
        }
      } else {
#pragma unroll 1
        for (u32 h = warp(); h < 32; h += 4) {
          if (base + h < heads) bring(place(h), q + (base + h) * d, c);
          else
            for (u32 i = 0; i < 4; i++) place(h)[i] = 0.0f;
        }
      }
    }
    copy_commit();
    float weight[8], acc[8][LANE_POOLS];
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      u32 h = base + 4 * j + warp();
      weight[j] = h < heads ? w[h] : 0.0f;
#pragma unroll
      for (u32 p = 0; p < LANE_POOLS; p++) acc[j][p] = 0.0f;
    }
    copy_wait<0>();
    __syncthreads();
    const float *key = s_pool + lane() * apart, *x = s_q + warp() * 32;
#pragma unroll 2
    for (u32 c = 0; c < padded; c += 4) {
      Float4 k[LANE_POOLS], v[8];
#pragma unroll
      for (u32 p = 0; p < LANE_POOLS; p++) k[p] = *(const Float4*)(key + 32 * p * apart + c);
#pragma unroll
      for (u32 j = 0; j < 8; j++) v[j] = *(const Float4*)(x + c * 33 + 4 * j);
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
#pragma unroll
          for (u32 p = 0; p < LANE_POOLS; p++) acc[j][p] = fma_rn(k[p].v[i], v[j].v[i], acc[j][p]);
        }
      }
    }
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      // Heads 4 j + warp and those 16 after them belong to one sum.
#pragma unroll
      for (u32 p = 0; p < LANE_POOLS; p++) {
        float dot = acc[j][p] * scale;
        dot = dot > 0.0f ? dot : 0.0f;
        if (j < 4 || base + 16 < heads) sums[j % 4][p] = fma_rn(weight[j] * root, dot, sums[j % 4][p]);
      }
    }
  }
#pragma unroll
  for (u32 p = 0; p < LANE_POOLS; p++) s_sums[warp()][32 * p + lane()] = (sums[0][p] + sums[2][p]) + (sums[1][p] + sums[3][p]);
  __syncthreads();
  const u32 mine = threadIdx.x;
  if (mine >= count) return;
  float sum = (s_sums[0][mine] + s_sums[2][mine]) + (s_sums[1][mine] + s_sums[3][mine]);
  keys[blockIdx.x * keys_stride + first + mine] = ordered(sum);
}

// Pools that `place_listed` marks at a time: a word a thread.
#define MOST_BITS (32 * 1024)
// Keys that a thread of `idx_select` can hold.
#define HELD 16

// Calls `place(p, i, key)` for the chosen of a list in order of their index, which is below n: a bit each says which they are.
template <class G> DEVICE void place_listed(u32 listed, u32 n, Threshold t, G place) {
  SHARED u32 s_more[MOST_BITS / 32], s_same[MOST_BITS / 32];
  const BestRoom& room = best_room();
  const u32 threads = blockDim.x;
  u32 done = 0, equal = 0;
  // So many values at a time.
#pragma unroll 1
  for (u32 first = 0; first < n; first += MOST_BITS) {
    for (u32 w = threadIdx.x; w < MOST_BITS / 32; w += threads) s_more[w] = s_same[w] = 0;
    __syncthreads();
    for (u32 j = threadIdx.x; j < listed; j += threads) {
      u32 i = room.at[j] - first, k = room.keys[j];
      if (room.at[j] >= first && i < MOST_BITS && k >= t.key) atomicOr(k > t.key ? &s_more[i / 32] : &s_same[i / 32], 1u << i % 32);
    }
    __syncthreads();
    // A word a thread. Of those that equal the threshold the first in all.
    const u32 word = threadIdx.x;
    u32 more = s_more[word], same = s_same[word], all, before = sum_before(__popc(more) << 16 | __popc(same), all);
    u32 equal_before = equal + (before & 0xffffu), place_at = done + (before >> 16) + low(equal_before, t.ties) - low(equal, t.ties);
    u32 chosen = more;
    while (same != 0 && equal_before < t.ties) {
      chosen |= same & (0u - same);
      same &= same - 1;
      equal_before++;
    }
    while (chosen != 0) {
      place(place_at++, first + 32 * word + __ffs(chosen) - 1, 0);
      chosen &= chosen - 1;
    }
    done += (all >> 16) + low(equal + (all & 0xffffu), t.ties) - low(equal, t.ties);
    equal += all & 0xffffu;
    __syncthreads();
  }
}

// Positions that each row sees, ascending, then -1: the best pools (ties to the lower one) and the open pool's tokens; all
// positions where there are few enough. A block a row. Bound: latency, of a fetch of the keys and some three histograms; of
// more keys than the threads can hold, their bytes, twice.
KERNEL THREADS(1024) idx_select(
    const Round* round, u32 first_row, u32 pool, u32 budget, u32 longest, const u32* keys, u64 keys_stride,
    i32* lists, u32 lists_stride, i32* counts, u32 counts_stride) {
  u32 row = first_row + blockIdx.x, visible = round->positions[row] + 1, full = visible / pool;
  i32* list = lists + (u64)blockIdx.x * lists_stride;
  keys += blockIdx.x * keys_stride;
  u32 count = visible;
  if (full <= budget) {
    for (u32 i = threadIdx.x; i < visible; i += blockDim.x) list[i] = (i32)i;
  } else {
    count = budget * pool + visible - full * pool;
    const auto all = keys_at(full, keys);
    u32 listed;
    Threshold t;
    if (full <= HELD * blockDim.x) t = choose(Held<HELD>(full, keys), all, budget, listed);
    else t = choose(all, all, budget, listed);
    auto put = [=](u32 place, u32 i, u32) {
      for (u32 j = 0; j < pool; j++) list[place * pool + j] = (i32)(i * pool + j);
    };
    if (listed > LISTED) place_best(all, t, put);
    else place_listed(listed, full, t, put);
    for (u32 i = threadIdx.x; i < visible - full * pool; i += blockDim.x) list[budget * pool + i] = (i32)(full * pool + i);
  }
  for (u32 i = count + threadIdx.x; i < longest; i += blockDim.x) list[i] = -1;
  if (threadIdx.x == 0) counts[(u64)blockIdx.x * counts_stride] = (i32)count;
}
