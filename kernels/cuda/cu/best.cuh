// The best of many values, by one block of threads: how `idx.select` and `sample.candidates` choose.
//
// A set has a key for each of its values, which every look at it fetches anew. Value t * threads + i of a chunk belongs to thread i. Loops
// stay loops: where one block does everything once, the time to fetch instructions counts.
//
// `place_chosen` looks for a short list first: where c threads have a key that is not below some number, neither are c keys of the set, and of
// the threads' largest keys such a number is found by halving. What is not below it is seldom much more than c keys, of which the same
// halving finds the threshold. Where the list does not stay short, histograms find it (`threshold_of`).

// Keys that a thread fetches at a time.
#define AT_ONCE 4

// `n` keys, of which `key(i)` is one.
template <class F> struct Keys {
  u32 n;
  F key;
  // Calls `look(turn, i, key)` for turns below `turns` of the values from `first` on, by all threads together. Beyond the end the last
  // one comes again.
  template <class G> DEVICE void look(u32 first, u32 turns, G look) const {
#pragma unroll 1
    for (u32 base = 0; base < turns; base += AT_ONCE) {
      u32 k[AT_ONCE];
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++) k[j] = key(low(first + (base + j) * blockDim.x + threadIdx.x, n - 1));
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++) {
        if (base + j < turns) look(base + j, first + (base + j) * blockDim.x + threadIdx.x, k[j]);
      }
    }
  }
};
template <class F> DEVICE Keys<F> keys_by(u32 n, F key) { return {n, key}; }
// Keys in memory of any kind.
DEVICE auto keys_at(u32 n, const u32* at) {
  return keys_by(n, [=](u32 i) { return at[i]; });
}

#define BINS 2048
// Keys that a list has room for; two a thread of the largest block.
#define LISTED 2048

// Shared memory of a block that chooses: the same for all that it does, one after the other.
struct BestRoom {
  // A list's keys, or the bins of a histogram; and where those keys are in their set.
  u32 keys[LISTED], at[LISTED];
  u32 counts[1024], warps[32], ends[64], digit, left;
};
DEVICE BestRoom& best_room() {
  SHARED BestRoom s_room;
  return s_room;
}

// What separates the chosen: keys above `key`, and the first `ties` of those equal to it.
struct Threshold {
  u32 key, ties;
};

// Sum of `mine` over the threads before this one; `all`: over all threads. The threads have met when this returns, and have to meet once
// more before the next.
DEVICE u32 sum_before(u32 mine, u32& all) {
  u32* warps = best_room().warps;
  u32 v = mine;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(ALL, v, step);
    if (lane() >= step) v += other;
  }
  if (lane() == 31) warps[warp()] = v;
  __syncthreads();
  // Every warp adds the warps for itself.
  u32 own = lane() < blockDim.x / 32 ? warps[lane()] : 0;
  all = __reduce_add_sync(ALL, own);
  return __reduce_add_sync(ALL, lane() < warp() ? own : 0) + v - mine;
}

// The largest and the smallest of the threads' numbers, without those that are 0.
DEVICE void ends_of(u32 mine, u32& most, u32& least) {
  u32* room = best_room().ends;
  most = __reduce_max_sync(ALL, mine);
  least = __reduce_min_sync(ALL, mine > 0 ? mine : ~0u);
  if (lane() == 0) {
    room[warp()] = most;
    room[32 + warp()] = least;
  }
  __syncthreads();
  const bool there = lane() < blockDim.x / 32;
  most = __reduce_max_sync(ALL, there ? room[lane()] : 0);
  least = __reduce_min_sync(ALL, there ? room[32 + lane()] : ~0u);
}

// What separates some of the keys from the rest: at least `wanted` of them where one is found that at most `most` reach, else just
// `wanted`. `reach(k)` says how many keys are not below k, to all threads: at least `wanted` for `under`, none for `beyond`.
template <class F> DEVICE Threshold halved(u32 under, u32 beyond, u32 wanted, u32 most, F reach) {
  u32 above = 0;
  while (beyond - under > 1) {
    u32 middle = under + (beyond - under) / 2, count = reach(middle);
    if (count < wanted) {
      beyond = middle;
      above = count;
    } else {
      under = middle;
      if (count <= most) return {under - 1, 0};
    }
  }
  return {under, wanted - above};
}

// The threshold that leaves `count` of the values, count being below their number: digit by digit from the top, a histogram each.
// Digits have 11, 11 and 10 bits: the first tells exponents and a little more, so that not all values meet in a few bins. The
// threads of a block are a power of two.
template <class S> DEVICE Threshold threshold_of(const S& set, u32 count) {
  BestRoom& room = best_room();
  u32* bins = room.keys;
  const u32 n = set.n, turns = (n + blockDim.x - 1) / blockDim.x;
  // From the largest digit down, so many bins a thread.
  const u32 each = BINS / blockDim.x, top = BINS - 1 - each * threadIdx.x;
  u32 prefix = 0, mask = 0, left = count;
  for (u32 j = 0; j < each; j++) bins[top - j] = 0;
  __syncthreads();
  for (u32 digit = 0; digit < 3; digit++) {
    const u32 shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, digits = digit < 2 ? BINS : BINS / 2;
    set.look(0, turns, [&](u32, u32 i, u32 k) {
      if (i < n && (k & mask) == prefix) atomicAdd(&bins[k >> shift & (digits - 1)], 1u);
    });
    __syncthreads();
    u32 mine = 0, all;
    for (u32 j = 0; j < each; j++) mine += bins[top - j];
    // The one in which the last of the chosen lies.
    u32 found = sum_before(mine, all);
    if (found < left && left <= found + mine) {
      u32 at = top;
      while (found + bins[at] < left) found += bins[at--];
      room.digit = at;
      room.left = left - found;
    }
    // A thread's bins are its own until the threads have met again.
    for (u32 j = 0; j < each; j++) bins[top - j] = 0;
    __syncthreads();
    prefix |= room.digit << shift;
    mask |= (digits - 1) << shift;
    left = room.left;
  }
  return {prefix, left};
}

// Calls `place(p, i, key)` for the p-th of the chosen values in order of their index, and says how many there are. With TIES some of those
// that equal the threshold are chosen; without, none is.
template <bool TIES, class S, class G> DEVICE u32 place_best(const S& set, Threshold t, G place) {
  // For each 32 values that a warp looks at together: how many are above, and how many equal to the threshold, in the
  // upper and lower half of a word. Then how many of each come before.
  u32* counts = best_room().counts;
  const u32 n = set.n, warps = blockDim.x / 32;
  u32 above = 0, equal = 0;
  for (u32 first = 0; first < n; first += 32 * blockDim.x) {
    u32 turns = low(32, (n - first + blockDim.x - 1) / blockDim.x);
    set.look(first, turns, [&](u32 turn, u32 i, u32 k) {
      u32 count = __popc(__ballot_sync(ALL, i < n && k > t.key)) << 16;
      if (TIES) count |= __popc(__ballot_sync(ALL, i < n && k == t.key));
      if (lane() == 0) counts[turn * warps + warp()] = count;
    });
    __syncthreads();
    u32 all, before = sum_before(threadIdx.x < turns * warps ? counts[threadIdx.x] : 0, all);
    if (threadIdx.x < turns * warps) counts[threadIdx.x] = before;
    __syncthreads();
    set.look(first, turns, [&](u32 turn, u32 i, u32 k) {
      u32 before = counts[turn * warps + warp()], mine = (1u << lane()) - 1;
      u32 more = __ballot_sync(ALL, i < n && k > t.key), same = TIES ? __ballot_sync(ALL, i < n && k == t.key) : 0;
      u32 equal_before = TIES ? equal + (before & 0xffffu) + __popc(same & mine) : 0;
      if (i < n && (k > t.key || (TIES && k == t.key && equal_before < t.ties))) {
        place(above + (before >> 16) + __popc(more & mine) + low(equal_before, t.ties), i, k);
      }
    });
    above += all >> 16;
    equal += all & 0xffffu;
    __syncthreads();
  }
  return above + low(equal, t.ties);
}

// A number, 0 if no other, that at least `count` of the threads' numbers reach, and seldom many more: those above `key`, and with `ties` those that
// equal it. `top`: the largest.
DEVICE Threshold bound_of(u32 mine, u32 count, u32& top) {
  u32 bottom;
  ends_of(mine, top, bottom);
  auto reach = [=](u32 k) { return (u32)__syncthreads_count(mine >= k); };
  if (reach(1) < count) return {0, 1};
  return halved(bottom, top + 1, count, count + count / 16, reach);
}

// Calls `place(p, i, key)` for the p-th of the `count` best values of a set, in order of their index; `count` is below their number.
template <class S, class G> DEVICE void place_chosen(const S& set, u32 count, G place) {
  BestRoom& room = best_room();
  const u32 n = set.n, threads = blockDim.x;
  u32 mine = 0, top, listed = ~0u;
  set.look(0, (n + threads - 1) / threads, [&](u32, u32 i, u32 k) { mine = i < n && k > mine ? k : mine; });
  Threshold bound = bound_of(mine, count, top);
  // What equals the bound belongs to the list.
  const u32 below = bound.ties > 0 ? bound.key - 1 : bound.key;
  if (bound.key > 0) {
    listed = place_best<false>(set, {below, 0}, [&](u32 p, u32 i, u32 k) {
      if (p < LISTED) {
        room.keys[p] = k;
        room.at[p] = i;
      }
    });
  }
  if (listed > LISTED) {
    place_best<true>(set, threshold_of(set, count), place);
    return;
  }
  const u32 first = threadIdx.x < listed ? room.keys[threadIdx.x] : 0;
  const u32 second = threads + threadIdx.x < listed ? room.keys[threads + threadIdx.x] : 0;
  Threshold t = halved(below + 1, top + 1, count, count, [=](u32 k) {
    u32 reach = __syncthreads_count(first >= k);
    if (listed > threads) reach += __syncthreads_count(second >= k);
    return reach;
  });
  place_best<true>(keys_at(listed, room.keys), t, [&](u32 p, u32 i, u32 k) { place(p, room.at[i], k); });
}
