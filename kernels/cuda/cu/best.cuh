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
  if (threadIdx.x == 0) {
    u32 sum = 0;
    for (u32 w = 0; w < blockDim.x / 32; w++) {
      u32 own = s_warps[w];
      s_warps[w] = sum;
      sum += own;
    }
    s_warps[32] = sum;
  }
  __syncthreads();
  u32 before = s_warps[warp()] + v - mine;
  all = s_warps[32];
  __syncthreads();
  return before;
}

// The threshold that leaves `count` of `n` values, count being below n: digit by digit from the top, a histogram each.
template <class F> DEVICE Threshold threshold_of(u32 n, u32 count, F key) {
  SHARED u32 s_bins[256], s_digit, s_left;
  u32 prefix = 0, left = count;
  for (u32 shift = 32; shift > 0;) {
    shift -= 8;
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) s_bins[i] = 0;
    __syncthreads();
    u32 mask = shift == 24 ? 0 : ~0u << (shift + 8);
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
      u32 k = key(i);
      if ((k & mask) == prefix) atomicAdd(&s_bins[k >> shift & 255], 1u);
    }
    __syncthreads();
    if (warp() == 0) {
      // From the largest digit down, eight a lane: the one in which the last of the chosen lies.
      u32 mine = 0, top = 255 - 8 * lane();
      for (u32 j = 0; j < 8; j++) mine += s_bins[top - j];
      u32 sum = mine;
#pragma unroll
      for (u32 step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane() >= step) sum += other;
      }
      u32 found = sum - mine;
      if (found < left && left <= sum) {
        u32 digit = top;
        while (found + s_bins[digit] < left) found += s_bins[digit--];
        s_digit = digit;
        s_left = left - found;
      }
    }
    __syncthreads();
    prefix |= s_digit << shift;
    left = s_left;
    __syncthreads();
  }
  return {prefix, left};
}

// Calls `place(p, i)` for the p-th of the chosen values in order of their index.
template <class F, class G> DEVICE void place_best(u32 n, Threshold t, F key, G place) {
  u32 placed = 0, ties = 0;
  for (u32 first = 0; first < n; first += blockDim.x) {
    u32 i = first + threadIdx.x, k = i < n ? key(i) : 0;
    bool equal = i < n && k == t.key;
    u32 all_equal, all;
    u32 before = sum_before(equal, all_equal);
    bool chosen = i < n && (k > t.key || (equal && ties + before < t.ties));
    u32 at = sum_before(chosen, all);
    if (chosen) place(placed + at, i);
    placed += all;
    ties += all_equal;
  }
}
