// The best of many values, by one block of threads: how `idx.select` and `sample.candidates` choose.

// What separates the chosen: keys above `key`, and the first `ties` of those equal to it.
struct Threshold {
  u32 key, ties;
};

// Sum of `mine` over the threads before this one; `all`: over all threads.
DEVICE u32 sum_before(u32 mine, u32& all) {
  SHARED u32 s_warps[33];
  u32 v = mine;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(ALL, v, step);
    if (lane() >= step) v += other;
  }
  if (lane() == 31) s_warps[warp()] = v;
  __syncthreads();
  if (warp() == 0) {
    u32 own = lane() < blockDim.x / 32 ? s_warps[lane()] : 0, sum = own;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      u32 other = __shfl_up_sync(ALL, sum, step);
      if (lane() >= step) sum += other;
    }
    s_warps[lane()] = sum - own;
    if (lane() == 31) s_warps[32] = sum;
  }
  __syncthreads();
  u32 before = s_warps[warp()] + v - mine;
  all = s_warps[32];
  __syncthreads();
  return before;
}

#define BINS 2048
// Keys that a thread has under way at a time.
#define AT_ONCE 8

// The threshold that leaves `count` of `n` values, count being below n: digit by digit from the top, a histogram each. Digits
// have 11, 11 and 10 bits: the first tells exponents and a little more, so that not all values meet in a few bins.
template <class F> DEVICE Threshold threshold_of(u32 n, u32 count, F key) {
  SHARED u32 s_bins[BINS], s_digit, s_left;
  u32 prefix = 0, mask = 0, left = count;
  for (u32 turn = 0; turn < 3; turn++) {
    u32 shift = turn == 0 ? 21 : turn == 1 ? 10 : 0, digits = turn < 2 ? BINS : BINS / 2;
    for (u32 i = threadIdx.x; i < BINS; i += blockDim.x) s_bins[i] = 0;
    __syncthreads();
    for (u32 first = threadIdx.x; first < n; first += AT_ONCE * blockDim.x) {
      u32 k[AT_ONCE];
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++) {
        u32 i = first + j * blockDim.x;
        k[j] = i < n ? key(i) : ~prefix;
      }
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++) {
        if (first + j * blockDim.x < n && (k[j] & mask) == prefix) atomicAdd(&s_bins[k[j] >> shift & (digits - 1)], 1u);
      }
    }
    __syncthreads();
    // From the largest digit down, so many a thread: the one in which the last of the chosen lies.
    u32 each = (BINS + blockDim.x - 1) / blockDim.x, top = BINS - 1 - each * threadIdx.x, mine = 0, all;
    for (u32 j = 0; j < each; j++) mine += each * threadIdx.x + j < BINS ? s_bins[top - j] : 0;
    u32 found = sum_before(mine, all);
    if (found < left && left <= found + mine) {
      while (found + s_bins[top] < left) found += s_bins[top--];
      s_digit = top;
      s_left = left - found;
    }
    __syncthreads();
    prefix |= s_digit << shift;
    mask |= (digits - 1) << shift;
    left = s_left;
    __syncthreads();
  }
  return {prefix, left};
}

// Calls `place(p, i)` for the p-th of the chosen values in order of their index.
template <class F, class G> DEVICE void place_best(u32 n, Threshold t, F key, G place) {
  // For each 32 values that a warp looks at together: how many are above, and how many equal to the threshold, in the
  // upper and lower half of a word. Then how many of each come before.
  SHARED u32 s_counts[1024];
  u32 above = 0, equal = 0, warps = blockDim.x / 32;
  for (u32 first = 0; first < n; first += 32 * blockDim.x) {
    u32 turns = low(32, (n - first + blockDim.x - 1) / blockDim.x);
#pragma unroll 4
    for (u32 turn = 0; turn < turns; turn++) {
      u32 i = first + turn * blockDim.x + threadIdx.x, k = i < n ? key(i) : 0;
      u32 more = __popc(__ballot_sync(ALL, i < n && k > t.key)), same = __popc(__ballot_sync(ALL, i < n && k == t.key));
      if (lane() == 0) s_counts[turn * warps + warp()] = more << 16 | same;
    }
    __syncthreads();
    u32 all, own = threadIdx.x < turns * warps ? s_counts[threadIdx.x] : 0, before = sum_before(own, all);
    if (threadIdx.x < turns * warps) s_counts[threadIdx.x] = before;
    __syncthreads();
#pragma unroll 4
    for (u32 turn = 0; turn < turns; turn++) {
      u32 i = first + turn * blockDim.x + threadIdx.x, k = i < n ? key(i) : 0, counts = s_counts[turn * warps + warp()];
      u32 more = __ballot_sync(ALL, i < n && k > t.key), same = __ballot_sync(ALL, i < n && k == t.key), mine = (1u << lane()) - 1;
      u32 equal_before = equal + (counts & 0xffffu) + __popc(same & mine);
      if (i < n && (k > t.key || (k == t.key && equal_before < t.ties))) {
        place(above + (counts >> 16) + __popc(more & mine) + low(equal_before, t.ties), i);
      }
    }
    above += all >> 16;
    equal += all & 0xffffu;
    __syncthreads();
  }
}
