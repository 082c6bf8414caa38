// The best of many values, by one block of threads: how `idx.select` and `sample.candidates` choose.
//
// Value t * threads + i of a chunk belongs to thread i. Whoever can hold them all has their keys in registers (`Kept`), so that
// the latency of memory is there once; longer lists are fetched anew for each look (`Fetched`), eight of a thread at a time.

// Keys that a thread fetches at a time.
#define AT_ONCE 8

// The keys of `n` values, TURNS a thread.
template <u32 TURNS> struct Kept {
  u32 n, keys[TURNS];
  // All loads, then all keys. Beyond the end the last value is fetched again, and not looked at.
  template <class F> DEVICE Kept(u32 n, F value) : n(n) {
    float v[TURNS];
#pragma unroll
    for (u32 t = 0; t < TURNS; t++) v[t] = value(low(t * blockDim.x + threadIdx.x, n - 1));
#pragma unroll
    for (u32 t = 0; t < TURNS; t++) keys[t] = ordered(v[t]);
  }
  // Calls `look(turn, i, key)` for turns below `turns` of the values from `first` on, by all threads together.
  template <class G> DEVICE void look(u32 first, u32 turns, G look) const {
#pragma unroll
    for (u32 t = 0; t < TURNS; t++) {
      if (t < turns) look(t, first + t * blockDim.x + threadIdx.x, keys[t]);
    }
  }
};

// The same of any number of values.
template <class F> struct Fetched {
  u32 n;
  F value;
  template <class G> DEVICE void look(u32 first, u32 turns, G look) const {
#pragma unroll 1
    for (u32 base = 0; base < turns; base += AT_ONCE) {
      float v[AT_ONCE];
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++) v[j] = value(low(first + (base + j) * blockDim.x + threadIdx.x, n - 1));
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++) {
        if (base + j < turns) look(base + j, first + (base + j) * blockDim.x + threadIdx.x, ordered(v[j]));
      }
    }
  }
};
template <class F> DEVICE Fetched<F> fetched(u32 n, F value) { return {n, value}; }

// What separates the chosen: keys above `key`, and the first `ties` of those equal to it.
struct Threshold {
  u32 key, ties;
};

// Sum of `mine` over the threads before this one; `all`: over all threads. `warps` has a word a warp, which nobody may still be
// reading; the threads have met when this returns.
DEVICE u32 sum_before(u32 mine, u32* warps, u32& all) {
  u32 v = mine;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(ALL, v, step);
    if (lane() >= step) v += other;
  }
  if (lane() == 31) warps[warp()] = v;
  __syncthreads();
  // Every warp adds the warps for itself.
  u32 own = lane() < blockDim.x / 32 ? warps[lane()] : 0, sum = own;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(ALL, sum, step);
    if (lane() >= step) sum += other;
  }
  all = __shfl_sync(ALL, sum, 31);
  return __shfl_sync(ALL, sum - own, warp()) + v - mine;
}

#define BINS 2048

// The threshold that leaves `count` of the values, count being below their number: digit by digit from the top, a histogram each.
// Digits have 11, 11 and 10 bits: the first tells exponents and a little more, so that not all values meet in a few bins. The
// threads of a block are a power of two.
template <class S> DEVICE Threshold threshold_of(const S& set, u32 count) {
  SHARED u32 s_bins[BINS], s_warps[32], s_digit, s_left;
  const u32 n = set.n, turns = (n + blockDim.x - 1) / blockDim.x;
  // From the largest digit down, so many bins a thread.
  const u32 each = BINS / blockDim.x, top = BINS - 1 - each * threadIdx.x;
  u32 prefix = 0, mask = 0, left = count;
  for (u32 j = 0; j < each; j++) s_bins[top - j] = 0;
  __syncthreads();
  for (u32 digit = 0; digit < 3; digit++) {
    const u32 shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, digits = digit < 2 ? BINS : BINS / 2;
    set.look(0, turns, [&](u32, u32 i, u32 k) {
      if (i < n && (k & mask) == prefix) atomicAdd(&s_bins[k >> shift & (digits - 1)], 1u);
    });
    __syncthreads();
    u32 mine = 0, all;
    for (u32 j = 0; j < each; j++) mine += s_bins[top - j];
    // The one in which the last of the chosen lies.
    u32 found = sum_before(mine, s_warps, all);
    if (found < left && left <= found + mine) {
      u32 at = top;
      while (found + s_bins[at] < left) found += s_bins[at--];
      s_digit = at;
      s_left = left - found;
    }
    // A thread's bins are its own until the threads have met again.
    for (u32 j = 0; j < each; j++) s_bins[top - j] = 0;
    __syncthreads();
    prefix |= s_digit << shift;
    mask |= (digits - 1) << shift;
    left = s_left;
  }
  return {prefix, left};
}

// Calls `place(p, i)` for the p-th of the chosen values in order of their index.
template <class S, class G> DEVICE void place_best(const S& set, Threshold t, G place) {
  // For each 32 values that a warp looks at together: how many are above, and how many equal to the threshold, in the
  // upper and lower half of a word. Then how many of each come before.
  SHARED u32 s_counts[1024], s_warps[32];
  const u32 n = set.n, warps = blockDim.x / 32;
  u32 above = 0, equal = 0;
  for (u32 first = 0; first < n; first += 32 * blockDim.x) {
    u32 turns = low(32, (n - first + blockDim.x - 1) / blockDim.x);
    set.look(first, turns, [&](u32 turn, u32 i, u32 k) {
      u32 more = __popc(__ballot_sync(ALL, i < n && k > t.key)), same = __popc(__ballot_sync(ALL, i < n && k == t.key));
      if (lane() == 0) s_counts[turn * warps + warp()] = more << 16 | same;
    });
    __syncthreads();
    u32 all, before = sum_before(threadIdx.x < turns * warps ? s_counts[threadIdx.x] : 0, s_warps, all);
    if (threadIdx.x < turns * warps) s_counts[threadIdx.x] = before;
    __syncthreads();
    set.look(first, turns, [&](u32 turn, u32 i, u32 k) {
      u32 counts = s_counts[turn * warps + warp()], mine = (1u << lane()) - 1;
      u32 more = __ballot_sync(ALL, i < n && k > t.key), same = __ballot_sync(ALL, i < n && k == t.key);
      u32 equal_before = equal + (counts & 0xffffu) + __popc(same & mine);
      if (i < n && (k > t.key || (k == t.key && equal_before < t.ties))) {
        place(above + (counts >> 16) + __popc(more & mine) + low(equal_before, t.ties), i);
      }
    });
    above += all >> 16;
    equal += all & 0xffffu;
    __syncthreads();
  }
}
