// The best of many values, by one block of threads: how `idx.select` and `sample.candidates` choose.
//
// Where something is known that seldom much more than those reach, a histogram between it and the largest, of what the threads go through by
// themselves, finds what separates them (`separated`). Otherwise histograms of a whole set do, of which every look fetches the keys anew
// (`threshold_of`). Loops stay loops: where one block does everything once, the time to fetch instructions counts.

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

// Bins of a histogram of a whole set.
#define BINS 2048
// Bins of one of keys that are held.
#define HELD_BINS 1024

// Shared memory of a block that chooses: the same for all that it does, one after the other.
struct BestRoom {
  // Bins of a histogram of keys that are held, or counts of warps.
  u32 counts[HELD_BINS], warps[32], ends[64], digit, above, left;
  // Keys of a stretch that has few, and how many are there.
  u32 few[32], fews;
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

// The largest of the threads' largest numbers, and the smallest of their smallest. The threads have met when this returns.
DEVICE void ends_of(u32 own_most, u32 own_least, u32& most, u32& least) {
  u32* room = best_room().ends;
  most = __reduce_max_sync(ALL, own_most);
  least = __reduce_min_sync(ALL, own_least);
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

// The stretch of 2^shift key numbers, counted from `low`, in which the `count`-th largest of the keys lies that `every(look)` goes through. Only
// keys from `low` on are looked at, below `low` + `span`: at most as many stretches as bins. A thread has EACH bins, the first the
// last ones: a block has HELD_BINS / EACH threads.
template <u32 EACH, class A> DEVICE Stretch stretch_of(const A& every, u32 low, u32 span, u32 shift, u32 count) {
  constexpr u32 threads = HELD_BINS / EACH;
  BestRoom& room = best_room();
  // Bins of a thread are apart, so that those of a warp lie in different banks.
  u32* bins = room.counts + (threads - 1 - threadIdx.x);
#pragma unroll
  for (u32 e = 0; e < EACH; e++) bins[e * threads] = 0;
  if (threadIdx.x == 0) room.fews = 0;
  __syncthreads();
  every([&](u32 key) {
    // Below `low` the difference is large.
    if (key - low < span) {
      u32 bin = key - low >> shift;
      atomicAdd(&room.counts[bin % EACH * threads + bin / EACH], 1u);
    }
  });
  __syncthreads();
  u32 inside[EACH], mine = 0, all;
#pragma unroll
  for (u32 e = 0; e < EACH; e++) {
    inside[e] = bins[(EACH - 1 - e) * threads];
    mine += inside[e];
  }
  u32 before = sum_before(mine, all);
  if (before < count && count <= before + mine) {
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      if (before < count && count <= before + inside[e]) {
        room.digit = HELD_BINS - 1 - EACH * threadIdx.x - e;
        room.above = before;
        room.left = inside[e];
      }
      before += inside[e];
    }
  }
  __syncthreads();
  return {low + (room.digit << shift), room.above, room.left};
}

// What separates the `count` largest of the keys of a stretch of `span` from `edge` on, which has `inside` of them, up to 32.
template <class A> DEVICE Threshold separated_few(const A& every, u32 edge, u32 span, u32 inside, u32 count) {
  BestRoom& room = best_room();
  every([&](u32 key) {
    if (key - edge < span) room.few[atomicAdd(&room.fews, 1u)] = key;
  });
  __syncthreads();
  // Each warp for itself, a lane a key.
  const u32 mine = lane() < inside ? room.few[lane()] : 0;
  u32 more = 0, same = 0;
#pragma unroll 1
  for (u32 i = 0; i < inside; i++) {
    const u32 other = room.few[i];
    more += other > mine ? 1 : 0;
    same += other == mine ? 1 : 0;
  }
  const u32 at = __ffs(__ballot_sync(ALL, lane() < inside && more < count && count <= more + same)) - 1;
  const u32 key = __shfl_sync(ALL, mine, at), ties = count - __shfl_sync(ALL, more, at);
  return ties == __shfl_sync(ALL, same, at) ? Threshold{key - 1, 0} : Threshold{key, ties};
}

// What separates the `count` largest of the keys between `bottom`, above 0, and `top`, with up to `more` besides; there are as many.
template <u32 EACH, class A> DEVICE Threshold separated(const A& every, u32 bottom, u32 top, u32 count, u32 more) {
  u32 low = bottom, span = top - bottom + 1, bits = 32 - __clz(top - bottom), shift = bits > 10 ? bits - 10 : 0, left = count;
  while (true) {
    Stretch s = stretch_of<EACH>(every, low, span, shift, left);
    left -= s.above;
    if (s.inside <= left + more) return {s.edge - 1, 0};
    // So narrow that its keys are equal.
    if (shift == 0) return {s.edge, left};
    if (s.inside <= 32) return separated_few(every, s.edge, 1u << shift, s.inside, left);
    low = s.edge;
    span = 1u << shift;
    shift = shift > 10 ? shift - 10 : 0;
  }
}

// What separates at least `count` of the threads' numbers, N each, and seldom many more; {0, 1} where fewer than that are above 0. `top`: the
// largest.
template <u32 EACH, u32 N> DEVICE Threshold bound_of(const u32 (&own)[N], u32 count, u32& top) {
  u32 most = 0, least = ~0u, there = 0, bottom;
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    most = own[j] > most ? own[j] : most;
    least = own[j] > 0 && own[j] < least ? own[j] : least;
  }
  ends_of(most, least, top, bottom);
#pragma unroll
  for (u32 j = 0; j < N; j++) there += __syncthreads_count(own[j] > 0);
  if (there < count) return {0, 1};
  auto every = [&](auto look) {
#pragma unroll
    for (u32 j = 0; j < N; j++) look(own[j]);
  };
  return separated<EACH>(every, bottom, top, count, count / 16);
}

// The threshold that leaves `count` of the values, count being below their number: digit by digit from the top, a histogram each.
// Digits have 11, 11 and 10 bits: the first tells exponents and a little more, so that not all values meet in a few bins. The
// threads of a block are a power of two.
template <class S> DEVICE Threshold threshold_of(const S& set, u32 count) {
  BestRoom& room = best_room();
  SHARED u32 bins[BINS];
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
