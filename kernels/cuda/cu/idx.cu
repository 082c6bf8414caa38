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

// Pools that follow each other: a lane's.
#define GROUP 4
// Pools of a warp, and of the heads that are multiplied at a time those of a lane: 12 fetches of four channels serve 128 multiply-adds.
#define WARP_POOLS 32
#define LANE_HEADS 8
// Numbers from a row to the next in shared memory, beyond its own: rows that are read together lie in different banks.
#define ROW_GAP 4
// Parts of the channels: while one is multiplied the next one is on its way. All at once the memory brings them in the order of its pages, the
// first with the last.
#define PARTS 4

// Scores of pools for each row, as keys that order like them: sum over heads of w relu(q K). A block takes as many pools of a row as
// it has threads, a warp 32 of them with 32 heads at a time: a lane has four pools that follow each other and heads f, f + 4, .., with
// f of bits 0 and 2 of its number, so that of both few different rows are read at once. The channels are multiplied in order. The sum
// over heads is that of 16 sums which have heads i, i + 16, .., added in halves: the last two additions are of lanes. None of the keys
// is 0; `tops` gets the largest of each group. Bound: the bytes of the pool keys, or HI * dI multiply-adds a pool.
KERNEL THREADS(128, 2) idx_scores(
    const Round* round, u32 first_row, const float* q, u32 q_stride, const float* w, u32 w_stride, u32 heads, u32 d, u32 pool,
    u32 budget, float root, float scale, Cache pools, u32* keys, u32* tops, u64 keys_stride) {
  SHARED_BYTES(shared);
  // [pool][channel], a warp's by their place in the lanes, then [32 heads][channel]; channels are filled up with zeros to a multiple
  // of 16, which change no sum.
  const u32 padded = (d + 15) / 16 * 16, apart = padded + ROW_GAP, part = (padded / 16 + PARTS - 1) / PARTS * 16;
  float *s_pool = (float*)shared, *s_q = s_pool + blockDim.x * apart;
  q += (u64)blockIdx.x * q_stride;
  w += (u64)blockIdx.x * w_stride;
  // Rows that begin on multiples of 16 bytes come without passing through registers, of others number by number.
  auto bring = [=](float* to, const float* from, u32 c) {
    for (u32 j = c; j < c + 4; j++) to[j] = j < d ? from[j] : 0.0f;
  };
  const bool whole_q = d % 16 == 0 && (u64)q % 16 == 0;
  // In place of heads that are not there the last one.
  auto bring_heads = [=](u32 base) {
#pragma unroll 1
    for (u32 c = 4 * lane(); c < padded; c += 128) {
      auto from = [=](u32 h) { return q + low(base + h, heads - 1) * d; };
      if (whole_q) {
        // Every block begins with another head, so that they do not all ask for the same line.
#pragma unroll 8
        for (u32 j = warp(); j < 32; j += blockDim.x / 32) {
          const u32 h = (j + blockIdx.y) % 32;
          copy_async(s_q + h * apart + c, from(h) + c);
        }
      } else {
#pragma unroll 1
        for (u32 h = warp(); h < 32; h += blockDim.x / 32) bring(s_q + h * apart, from(h), c);
      }
    }
  };
  u32 row = first_row + blockIdx.x, seq = round->row_seq[row], full = (round->positions[row] + 1) / pool, first = blockIdx.y * blockDim.x;
  if (full <= budget || first >= full) return;
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq], count = low(blockDim.x, full - first);
  bring_heads(0);
  const float* key = pools.row(slot, parity, first);
  const u64 next = pools.row_bytes / 4;
  const bool whole = d % 16 == 0 && (u64)key % 16 == 0 && next % 4 == 0;
  auto bring_part = [=](u32 n) {
    // Eight lanes a row.
    const u32 end = low((n + 1) * part, padded), line = threadIdx.x / 8;
#pragma unroll 1
    for (u32 c = n * part + 4 * (threadIdx.x % 8); c < end; c += 32) {
      // In place of pools that are not there the last one.
      auto from = [=](u32 p) { return key + low(p, count - 1) * next; };
      auto to = [=](u32 p) { return s_pool + (p / 32 * 32 + p % 4 * 8 + p / 4 % 8) * apart; };
      if (whole) {
#pragma unroll
        for (u32 p = line, j = 0; j < 8; j++, p += blockDim.x / 8) copy_async(to(p) + c, from(p) + c);
      } else {
#pragma unroll 1
        for (u32 p = line; p < blockDim.x; p += blockDim.x / 8) bring(to(p), from(p), c);
      }
    }
  };
  bring_part(0);
  const u32 head = lane() % 2 + lane() / 4 % 2 * 2, mine = lane() / 2 % 2 + lane() / 8 * 2;
  const float *own = s_pool + (warp() * WARP_POOLS + mine) * apart, *x = s_q + head * apart;
  float sums[4][GROUP];
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
#pragma unroll
    for (u32 p = 0; p < GROUP; p++) sums[j][p] = 0.0f;
  }
#pragma unroll 1
  for (u32 base = 0; base < heads; base += 32) {
    if (base > 0) {
      __syncthreads();
      bring_heads(base);
    }
    float weight[LANE_HEADS], acc[LANE_HEADS][GROUP];
#pragma unroll
    for (u32 j = 0; j < LANE_HEADS; j++) {
      weight[j] = w[low(base + 4 * j + head, heads - 1)] * root;
#pragma unroll
      for (u32 p = 0; p < GROUP; p++) acc[j][p] = 0.0f;
    }
#pragma unroll 1
    for (u32 n = 0; n < PARTS; n++) {
      copy_commit();
      copy_wait<0>();
      __syncthreads();
      if (base == 0 && n + 1 < PARTS) bring_part(n + 1);
      const u32 end = low((n + 1) * part, padded);
#pragma unroll 1
      for (u32 first = n * part; first < end; first += 16) {
#pragma unroll
        for (u32 more = 0; more < 16; more += 4) {
          const u32 c = first + more;
          Float4 k[GROUP], v[LANE_HEADS];
#pragma unroll
          for (u32 p = 0; p < GROUP; p++) k[p] = *(const Float4*)(own + 8 * p * apart + c);
#pragma unroll
          for (u32 j = 0; j < LANE_HEADS; j++) v[j] = *(const Float4*)(x + 4 * j * apart + c);
#pragma unroll
          for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 j = 0; j < LANE_HEADS; j++) {
#pragma unroll
              for (u32 p = 0; p < GROUP; p++) acc[j][p] = fma_rn(k[p].v[i], v[j].v[i], acc[j][p]);
            }
          }
        }
      }
    }
#pragma unroll
    for (u32 j = 0; j < LANE_HEADS; j++) {
      // Heads h and h + 16 belong to one sum.
#pragma unroll
      for (u32 p = 0; p < GROUP; p++) {
        float dot = acc[j][p] * scale;
        dot = dot > 0.0f ? dot : 0.0f;
        if (base + 4 * j + head < heads) sums[j % 4][p] = fma_rn(weight[j], dot, sums[j % 4][p]);
      }
    }
  }
  Float4 found;
  u32 top = 1;
  const u32 at = warp() * WARP_POOLS + GROUP * mine;
#pragma unroll
  for (u32 p = 0; p < GROUP; p++) {
    float sum = (sums[0][p] + sums[2][p]) + (sums[1][p] + sums[3][p]);
    sum = sum + __shfl_xor_sync(ALL, sum, 4);
    sum = sum + __shfl_xor_sync(ALL, sum, 1);
    // What is no number, or no pool, is below all.
    u32 key = at + p < count ? ordered(sum) : 0;
    key = key > 0 ? key : 1;
    found.v[p] = float_of(key);
    top = key > top ? key : top;
  }
  if (head != 0 || warp() * WARP_POOLS >= count) return;
  const u64 out = blockIdx.x * keys_stride + first + at;
  *(Float4*)(keys + out) = found;
  tops[out / GROUP] = top;
}

// Groups that `idx_select` lists: so many a thread.
#define LISTED_GROUPS 1024
#define LISTED_EACH 2
// Groups whose largest keys it holds at a time: so many a thread.
#define HELD_GROUPS 4096
#define HELD_EACH 8
// Bins of a thread.
#define BINS_EACH 2

// Stores the positions of the best of a row's `full` pools. Where so many of the groups' largest keys are not below some number, neither are so many
// keys: only the keys of groups that reach it are looked at. Groups are listed in order, and threads take those that follow each other.
DEVICE void best_pools(const u32* keys, const u32* tops, u32 full, u32 pool, u32 budget, i32* list) {
  SHARED u32 s_listed[LISTED_GROUPS], s_picked[LISTED_GROUPS];
  const u32 groups = (full + GROUP - 1) / GROUP, chunks = (groups + HELD_GROUPS - 1) / HELD_GROUPS;
  u32 held[HELD_EACH], best[2] = {0, 0}, top, bottom = 1;
  // The first group of a thread, of whose warp the others follow.
  auto first_of = [=](u32 chunk) { return chunk * HELD_GROUPS + warp() * 32 * HELD_EACH + lane(); };
  auto hold = [&](u32 chunk) {
#pragma unroll
    for (u32 j = 0; j < HELD_EACH; j++) {
      const u32 at = first_of(chunk) + 32 * j;
      held[j] = at < groups ? tops[at] : 0;
    }
  };
#pragma unroll 1
  for (u32 chunk = chunks; chunk-- > 0;) {
    hold(chunk);
#pragma unroll
    for (u32 j = 0; j < HELD_EACH; j++) best[j % 2] = held[j] > best[j % 2] ? held[j] : best[j % 2];
  }
  if (groups > LISTED_GROUPS) {
    const Threshold bound = bound_of<BINS_EACH>(best, budget, top);
    bottom = bound.ties > 0 ? bound.key : bound.key + 1;
    bottom = bottom > 0 ? bottom : 1;
  }
  u32 count = 0;
#pragma unroll 1
  for (u32 chunk = 0; chunk < chunks; chunk++) {
    if (chunk > 0) hold(chunk);
    u32 which[HELD_EACH], mine = 0, all;
#pragma unroll
    for (u32 j = 0; j < HELD_EACH; j++) {
      which[j] = __ballot_sync(ALL, held[j] >= bottom);
      mine += __popc(which[j]);
    }
    __syncthreads();
    u32 at = count + __shfl_sync(ALL, sum_before(lane() == 0 ? mine : 0, all), 0);
    count += all;
#pragma unroll
    for (u32 j = 0; j < HELD_EACH; j++) {
      const u32 place = at + __popc(which[j] & (1u << lane()) - 1);
      if (held[j] >= bottom && place < LISTED_GROUPS) s_listed[place] = first_of(chunk) + 32 * j;
      at += __popc(which[j]);
    }
  }
  __syncthreads();
  if (count > LISTED_GROUPS || budget > LISTED_GROUPS) {
    const auto set = keys_at(full, keys);
    place_best(set, threshold_of(set, budget), [=](u32 p, u32 i, u32) {
      for (u32 j = 0; j < pool; j++) list[p * pool + j] = (i32)(i * pool + j);
    });
    return;
  }
  // Groups of a thread.
  const u32 each = (count + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each, mine = first < count ? low(each, count - first) : 0;
  u32 own[LISTED_EACH][GROUP], most = 0, least = ~0u;
#pragma unroll
  for (u32 j = 0; j < LISTED_EACH; j++) {
    const u32 at = j < mine ? GROUP * s_listed[first + j] : full;
    const Float4 group = j < mine ? *(const Float4*)(keys + at) : Float4{};
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
      own[j][i] = at + i < full ? bits_of(group.v[i]) : 0;
      most = own[j][i] > most ? own[j][i] : most;
      least = own[j][i] > 0 && own[j][i] < least ? own[j][i] : least;
    }
  }
  // Of few pools all are listed.
  if (groups <= LISTED_GROUPS) ends_of(most, least, top, bottom);
  auto every = [&](auto look) {
#pragma unroll
    for (u32 j = 0; j < LISTED_EACH; j++) {
#pragma unroll
      for (u32 i = 0; i < GROUP; i++) look(own[j][i]);
    }
  };
  const Threshold t = separated<BINS_EACH>(every, bottom, top, budget, 0);
  u32 more = 0, same = 0, all;
#pragma unroll
  for (u32 j = 0; j < LISTED_EACH; j++) {
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
      more |= (own[j][i] > t.key ? 1u : 0u) << GROUP * j + i;
      same |= (own[j][i] == t.key ? 1u : 0u) << GROUP * j + i;
    }
  }
  // Of those that equal the threshold the first in all.
  u32 before = sum_before(__popc(more) << 16 | __popc(same), all), equal = before & 0xffffu, at = (before >> 16) + low(equal, t.ties);
  for (; same != 0 && equal < t.ties; same &= same - 1, equal++) more |= same & (0u - same);
#pragma unroll 1
  for (; more != 0; more &= more - 1, at++) {
    const u32 j = __ffs(more) - 1;
    s_picked[at] = GROUP * s_listed[first + j / GROUP] + j % GROUP;
  }
  __syncthreads();
  if (pool == 4) {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < 4 * budget; i += blockDim.x) list[i] = (i32)(4 * s_picked[i / 4] + i % 4);
  } else {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < pool * budget; i += blockDim.x) list[i] = (i32)(pool * s_picked[i / pool] + i % pool);
  }
}

// Positions that each row sees, ascending, then -1: the best pools (ties to the lower one) and the open pool's tokens; all
// positions where there are few enough. A block a row. Bound: latency, of a fetch of the groups' largest keys, one of those
// that are in question, and two histograms; of very many equal keys, their bytes, five times.
KERNEL THREADS(512) idx_select(
    const Round* round, u32 first_row, u32 pool, u32 budget, u32 longest, const u32* keys, const u32* tops, u64 keys_stride,
    i32* lists, u32 lists_stride, i32* counts, u32 counts_stride) {
  const u32 visible = round->positions[first_row + blockIdx.x] + 1, full = visible / pool, open = visible - full * pool;
  const u32 count = full <= budget ? visible : budget * pool + open;
  i32* list = lists + (u64)blockIdx.x * lists_stride;
  for (u32 i = count + threadIdx.x; i < longest; i += blockDim.x) list[i] = -1;
  if (threadIdx.x == 0) counts[(u64)blockIdx.x * counts_stride] = (i32)count;
  if (full <= budget) {
    for (u32 i = threadIdx.x; i < visible; i += blockDim.x) list[i] = (i32)i;
    return;
  }
  for (u32 i = threadIdx.x; i < open; i += blockDim.x) list[budget * pool + i] = (i32)(full * pool + i);
  const u64 first = blockIdx.x * keys_stride;
  best_pools(keys + first, tops + first / GROUP, full, pool, budget, list);
}
