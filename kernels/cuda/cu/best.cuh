// The best of many values, by one block of threads: how `idx.select` and `sample.candidates` choose.
//
// A set has a key for each of its values, which every look at it fetches anew (`Keys`), or which the threads hold (`Held`). Value
// t * threads + i of a chunk belongs to thread i. Loops stay loops: where one block does everything once, the time to fetch
// instructions counts.
//
// `choose` looks for a short list first: where c threads have a key that is not below some number, neither are c keys of the set,
// and of the threads' largest keys a histogram finds such a number. What is not below it is seldom much more than c keys, of which
// another finds the threshold. Where the list does not stay short, histograms of the whole set find it (`threshold_of`). Its blocks
// have 1,024 threads.

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
// The same of keys in memory that the threads hold, N each.
template <u32 N> struct Held {
  u32 n, keys[N];
  DEVICE Held(u32 n, const u32* at) : n(n) {
#pragma unroll
    for (u32 t = 0; t < N; t++) keys[t] = at[low(t * blockDim.x + threadIdx.x, n - 1)];
  }
  template <class G> DEVICE void look(u32 first, u32, G look) const {
#pragma unroll
    for (u32 t = 0; t < N; t++) look(t, first + t * blockDim.x + threadIdx.x, keys[t]);
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
  // A list's keys, and where those are in their set; the bins of a histogram of a whole set.
  u32 keys[LISTED], at[LISTED];
  // Bins of a histogram of some keys of the threads, or counts of warps.
  u32 counts[1024], warps[32], ends[64], digit, above, left, listed;
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

// Where the `count`-th largest of some keys lies: from `edge` on in a stretch of key numbers, with how many above the stretch and in it.
struct Stretch {
  u32 edge, above, inside;
};

// The stretch of 2^shift key numbers, counted from `low`, in which the `count`-th largest of the threads' keys lies. Only keys from `low` on
// are looked at, below `low` + `span`: at most 1,024 stretches.
template <u32 N> DEVICE Stretch stretch_of(const u32 (&own)[N], u32 low, u32 span, u32 shift, u32 count) {
  BestRoom& room = best_room();
  const u32 bin = 1023 - threadIdx.x;
  room.counts[bin] = 0;
  __syncthreads();
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (own[j] >= low && own[j] - low < span) atomicAdd(&room.counts[own[j] - low >> shift], 1u);
  }
  __syncthreads();
  u32 inside = room.counts[bin], all, before = sum_before(inside, all);
  if (before < count && count <= before + inside) {
    room.digit = bin;
    room.above = before;
    room.left = inside;
  }
  __syncthreads();
  return {low + (room.digit << shift), room.above, room.left};
}

// What separates the `count` largest of the threads' keys between `bottom` and `top`, with up to `more` besides; there are as many.
template <u32 N> DEVICE Threshold separated(const u32 (&own)[N], u32 bottom, u32 top, u32 count, u32 more) {
  u32 low = bottom, span = top - bottom + 1, bits = 32 - __clz(top - bottom), shift = bits > 10 ? bits - 10 : 0, left = count;
  while (true) {
    Stretch s = stretch_of(own, low, span, shift, left);
    left -= s.above;
    if (s.inside <= left + more) return {s.edge - 1, 0};
    // So narrow that its keys are equal.
    if (shift == 0) return {s.edge, left};
    low = s.edge;
    span = 1u << shift;
    shift = shift > 10 ? shift - 10 : 0;
  }
}

// What separates at least `count` of the threads' numbers, and seldom many more; {0, 1} where fewer than that are above 0. `top`: the
// largest.
DEVICE Threshold bound_of(u32 mine, u32 count, u32& top) {
  u32 bottom;
  ends_of(mine, top, bottom);
  if (__syncthreads_count(mine > 0) < count) return {0, 1};
  const u32 one[1] = {mine};
  return separated(one, bottom, top, count, count / 16);
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

// Calls `place(p, i, key)` for the p-th of the chosen values in order of their index.
template <class S, class G> DEVICE void place_best(const S& set, Threshold t, G place) {
  // For each 32 values that a warp looks at together: how many are above, and how many equal to the threshold, in the
  // upper and lower half of a word. Then how many of each come before.
  u32* counts = best_room().counts;
  const u32 n = set.n, warps = blockDim.x / 32;
  u32 above = 0, equal = 0;
  for (u32 first = 0; first < n; first += 32 * blockDim.x) {
    u32 turns = low(32, (n - first + blockDim.x - 1) / blockDim.x);
    set.look(first, turns, [&](u32 turn, u32 i, u32 k) {
      u32 more = __popc(__ballot_sync(ALL, i < n && k > t.key)), same = __popc(__ballot_sync(ALL, i < n && k == t.key));
      if (lane() == 0) counts[turn * warps + warp()] = more << 16 | same;
    });
    __syncthreads();
    u32 all, before = sum_before(threadIdx.x < turns * warps ? counts[threadIdx.x] : 0, all);
    if (threadIdx.x < turns * warps) counts[threadIdx.x] = before;
    __syncthreads();
    set.look(first, turns, [&](u32 turn, u32 i, u32 k) {
      u32 before = counts[turn * warps + warp()], mine = (1u << lane()) - 1;
      u32 more = __ballot_sync(ALL, i < n && k > t.key), same = __ballot_sync(ALL, i < n && k == t.key);
      u32 equal_before = equal + (before & 0xffffu) + __popc(same & mine);
      if (i < n && (k > t.key || (k == t.key && equal_before < t.ties))) {
        place(above + (before >> 16) + __popc(more & mine) + low(equal_before, t.ties), i, k);
      }
    });
    above += all >> 16;
    equal += all & 0xffffu;
    __syncthreads();
  }
}

// What separates the `count` best values of a set, `count` being below their number; `all` are the same values. `listed`: keys and
// places of a list that has them all, in any order; more than `LISTED`: there is none.
template <class S, class A> DEVICE Threshold choose(const S& set, const A& all, u32 count, u32& listed) {
  BestRoom& room = best_room();
  const u32 n = set.n, threads = blockDim.x, turns = (n + threads - 1) / threads;
  u32 mine = 0, top;
  if (threadIdx.x == 0) room.listed = 0;
  set.look(0, turns, [&](u32, u32 i, u32 k) { mine = i < n && k > mine ? k : mine; });
  const Threshold bound = bound_of(mine, count, top);
  listed = ~0u;
  // What equals the bound belongs to the list.
  const u32 bottom = bound.ties > 0 ? bound.key : bound.key + 1;
  if (bottom > 0) {
    set.look(0, turns, [&](u32, u32 i, u32 k) {
      if (i < n && k >= bottom) {
        u32 at = atomicAdd(&room.listed, 1u);
        if (at < LISTED) {
          room.keys[at] = k;
          room.at[at] = i;
        }
      }
    });
    __syncthreads();
    listed = room.listed;
  }
  if (listed > LISTED) return threshold_of(all, count);
  const u32 own[2] = {
      threadIdx.x < listed ? room.keys[threadIdx.x] : 0, threads + threadIdx.x < listed ? room.keys[threads + threadIdx.x] : 0};
  return separated(own, bottom, top, count, 0);
}
