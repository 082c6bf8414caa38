// `sample.candidates`: the C largest logits of a row, falling, ties to the lower id; -inf and -1 where there are fewer.
//
// A few candidates:
// - `sample_tops`: a warp finds the largest of a stretch of logits. Bound: the bytes of the logits.
// - `sample_pick`: a block a row; no candidate is below the C-th largest of those, so only the stretches whose largest reaches it are fetched
//   once more. Bound: latency, of two fetches and a histogram or two.
// More of them:
// - `sample_slices`: a block takes 4096 logits and keeps the best C of them.
// - `sample_merge`: a block a row chooses among what the slices kept, and sorts it.

// Where a row's candidates go, from the largest down. A key: what orders the value, turned round, and its place in the row; ~0: none.
struct Candidates {
  const float* logits;
  u32 first_id;
  float* values;
  i32* ids;
  DEVICE void give(u32 i, u64 key) const {
    u32 place = (u32)key;
    bool there = place != ~0u;
    values[i] = there ? logits[place] : -infinity();
    ids[i] = there ? (i32)(first_id + place) : -1;
  }
};

#define SLICE 4096
#define SLICE_THREADS 512

// Kept keys, `[row][slice][keep]`, and their places in the row; a slice that has fewer fills up with the key of what is no number (place ~0).
KERNEL THREADS(512) sample_slices(
    const float* logits, u32 logits_stride, u32 n, u32 keep, u32* keys, u32* places) {
  u32 first = blockIdx.y * SLICE, count = low(SLICE, n - first);
  const float* x = logits + (u64)blockIdx.x * logits_stride + first;
  u64 at = ((u64)blockIdx.x * gridDim.y + blockIdx.y) * keep;
  keys += at;
  places += at;
  if (count <= keep) {
    for (u32 i = threadIdx.x; i < keep; i += blockDim.x) {
      keys[i] = i < count ? ordered(x[i]) : 0;
      places[i] = i < count ? first + i : ~0u;
    }
    return;
  }
  SHARED u32 s_slice[SLICE];
  for (u32 i = threadIdx.x; i < count; i += SLICE_THREADS) s_slice[i] = ordered(x[i]);
  __syncthreads();
  const auto set = keys_at(count, s_slice);
  place_best(set, threshold_of(set, keep), [=](u32 place, u32 i, u32 k) {
    keys[place] = k;
    places[place] = first + i;
  });
}

// `held` kept values a row. The best c of them (as many as there are, up to the `wanted`), sorted in shared memory by (falling key, rising place): `room` is c rounded
// up to a power of two.
KERNEL THREADS(1024) sample_merge(
    const float* logits, u32 logits_stride, const u32* kept, const u32* places, u32 held, u32 c, u32 room, u32 first_id,
    float* out, u32 out_stride, i32* ids, u32 ids_stride, u32 wanted) {
  SHARED_BYTES(shared);
  u64* keys = (u64*)shared;
  logits += (u64)blockIdx.x * logits_stride;
  kept += (u64)blockIdx.x * held;
  places += (u64)blockIdx.x * held;
  for (u32 i = threadIdx.x; i < room; i += blockDim.x) keys[i] = ~0ull;
  __syncthreads();
  auto put = [=](u32 place, u32 i, u32 k) { keys[place] = (u64)~k << 32 | places[i]; };
  if (held <= c) {
    for (u32 i = threadIdx.x; i < held; i += blockDim.x) put(i, i, kept[i]);
  } else {
    const auto set = keys_at(held, kept);
    place_best(set, threshold_of(set, c), put);
  }
  __syncthreads();
  for (u32 size = 2; size <= room; size *= 2) {
    for (u32 stride = size / 2; stride > 0; stride /= 2) {
      for (u32 i = threadIdx.x; i < room; i += blockDim.x) {
        u32 other = i ^ stride;
        if (other > i) {
          u64 a = keys[i], b = keys[other];
          if ((a > b) == ((i & size) == 0)) {
            keys[i] = b;
            keys[other] = a;
          }
        }
      }
      __syncthreads();
    }
  }
  const Candidates to = {logits, first_id, out + (u64)blockIdx.x * out_stride, ids + (u64)blockIdx.x * ids_stride};
  for (u32 i = threadIdx.x; i < wanted; i += blockDim.x) to.give(i, i < c ? keys[i] : ~0ull);
}

// Logits of a stretch, a power of two from 32 on, of which a lane of `sample_tops` fetches all it has at once.
#define MOST_STRETCH 128

// The largest key of each stretch, to `[row][stretch]`.
KERNEL THREADS(256) sample_tops(const float* logits, u32 logits_stride, u32 n, u32 shift, u32 stretches, u32* tops) {
  const u32 at = blockIdx.y * 8 + warp(), first = at << shift, stretch = 1u << shift;
  if (at >= stretches) return;
  const float* x = logits + (u64)blockIdx.x * logits_stride;
  u32 k[MOST_STRETCH / 32], top = 0;
  // Beyond the end the last one again.
#pragma unroll
  for (u32 j = 0; j < MOST_STRETCH / 32; j++) k[j] = ordered(x[low(low(first + 32 * j, first + stretch - 32) + lane(), n - 1)]);
#pragma unroll
  for (u32 j = 0; j < MOST_STRETCH / 32; j++) top = k[j] > top ? k[j] : top;
  top = __reduce_max_sync(ALL, top);
  if (lane() == 0) tops[(u64)blockIdx.x * stretches + at] = top;
}

// Candidates that `sample_pick` may find before it has chosen, and stretches that it fetches once more.
#define FOUND 1024
// Logits of those stretches that a thread fetches at a time.
#define NEAR_AT_ONCE 8
// Threads that share the comparisons of a candidate.
#define SHARERS 8

// The c best of a row, c being at most n and 1024.
KERNEL THREADS(1024) sample_pick(
    const float* logits, u32 logits_stride, u32 n, const u32* tops, u32 shift, u32 stretches, u32 c, u32 first_id, float* out,
    u32 out_stride, i32* ids, u32 ids_stride, u32 wanted) {
  SHARED u64 s_keys[FOUND];
  SHARED u32 s_stretches[FOUND], s_near, s_found;
  const u32 threads = blockDim.x, stretch = 1u << shift;
  logits += (u64)blockIdx.x * logits_stride;
  tops += (u64)blockIdx.x * stretches;
  const Candidates to = {logits, first_id, out + (u64)blockIdx.x * out_stride, ids + (u64)blockIdx.x * ids_stride};
  if (threadIdx.x == 0) s_near = s_found = 0;
  u32 mine = 0, top;
#pragma unroll 2
  for (u32 i = threadIdx.x; i < stretches; i += threads) {
    u32 k = tops[i];
    mine = k > mine ? k : mine;
  }
  const u32 own[1] = {mine};
  const Threshold bound = bound_of<1>(own, c, top);
  auto key = [=](u32 i) { return ordered(logits[i]); };
  // Every value above the bound, in any order.
#pragma unroll 2
  for (u32 i = threadIdx.x; i < stretches; i += threads) {
    if (tops[i] > bound.key) {
      u32 at = atomicAdd(&s_near, 1u);
      if (at < FOUND) s_stretches[at] = i;
    }
  }
  __syncthreads();
  const u32 near = low(s_near, FOUND) << shift;
#pragma unroll 1
  for (u32 base = threadIdx.x; base < near; base += NEAR_AT_ONCE * threads) {
    u32 at[NEAR_AT_ONCE], k[NEAR_AT_ONCE];
#pragma unroll
    for (u32 j = 0; j < NEAR_AT_ONCE; j++) {
      u32 i = base + j * threads;
      at[j] = i < near ? (s_stretches[i >> shift] << shift) + (i & stretch - 1) : n;
      k[j] = at[j] < n ? key(at[j]) : 0;
    }
#pragma unroll
    for (u32 j = 0; j < NEAR_AT_ONCE; j++) {
      if (k[j] > bound.key) {
        u32 place = atomicAdd(&s_found, 1u);
        if (place < FOUND) s_keys[place] = (u64)~k[j] << 32 | at[j];
      }
    }
  }
  __syncthreads();
  u32 found = s_found;
  if (s_near > FOUND || found > FOUND) {
    // Stretches that have many large ones.
    const auto set = keys_by(n, key);
    place_best(set, threshold_of(set, c), [&](u32 p, u32 i, u32 k) { s_keys[p] = (u64)~k << 32 | i; });
    found = c;
  }
  // The first of those that equal the bound.
#pragma unroll 1
  for (u32 first = 0; found < c && first < n; first += AT_ONCE * threads) {
    u32 k[AT_ONCE], count = 0, all;
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) k[j] = key(low(first + (warp() * AT_ONCE + j) * 32 + lane(), n - 1));
    auto same = [&](u32 j) { return first + (warp() * AT_ONCE + j) * 32 + lane() < n && k[j] == bound.key; };
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) count += __popc(__ballot_sync(ALL, same(j)));
    u32 before = sum_before(lane() == 0 ? count : 0, all);
    u32 at = found + __shfl_sync(ALL, before, 0);
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) {
      u32 equal = __ballot_sync(ALL, same(j)), place = at + __popc(equal & ((1u << lane()) - 1));
      if (same(j) && place < c) s_keys[place] = (u64)~k[j] << 32 | (first + (warp() * AT_ONCE + j) * 32 + lane());
      at += __popc(equal);
    }
    found = low(c, found + all);
    __syncthreads();
  }
  // Each is compared with all others, which are different.
  for (u32 base = 0; base < found; base += threads / SHARERS) {
    u32 i = base + threadIdx.x / SHARERS, rank = 0;
    u64 own = s_keys[low(i, found - 1)];
    for (u32 j = threadIdx.x % SHARERS; j < found; j += SHARERS) rank += s_keys[j] < own;
#pragma unroll
    for (u32 step = 1; step < SHARERS; step *= 2) rank += __shfl_xor_sync(ALL, rank, step);
    if (i < found && rank < c && threadIdx.x % SHARERS == 0) to.give(rank, own);
  }
  for (u32 i = c + threadIdx.x; i < wanted; i += threads) to.give(i, ~0ull);
}
