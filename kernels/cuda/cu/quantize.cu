// The encoder of EXL3: for the 256 numbers of a tile, the ring of states whose code values fit them best.
//
// A dynamic program over the trellis, as on the CPU (`kernels/src/cpu/exl3/quantize/viterbi.rs`) and with its bits: the same
// multiply-adds, the least cost whatever the order, and of equal ways the one with the least dropped bits. A block takes a
// tile at a time; each of its 1024 threads has 64 states, whose code values it reads as halves, eight at a time, from a table
// in its own order (`order` in the launch code), which stays in the multiprocessor's first cache. The costs of the nodes in
// front of each position go to device memory, where one warp finds the way back by looking at the predecessors of one node a
// position. Bound: 512 steps of 65,536 states a tile, four instructions each.

#define RING 256
#define WORKERS 1024
// Nodes that a thread finishes at once, where it need not finish all.
#define GROUP 8

#ifdef PLUGFOLD_HOST
DEVICE void two_halves(u32 x, float& a, float& b) {
  a = half_to_float((u16)x);
  b = half_to_float((u16)(x >> 16));
}
DEVICE float least(float a, float b) { return a < b ? a : b; }
#else
DEVICE void two_halves(u32 x, float& a, float& b) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
}
DEVICE float least(float a, float b) { return fminf(a, b); }
#endif

struct alignas(16) Eight {
  u32 pairs[4];
};

// HALVES is twice the bits a weight. A node in front of a position is what survives of the state before it: all of its 16
// bits but the position's new ones.
template <u32 HALVES> struct Trellis {
  // New bits of even and of odd positions.
  static constexpr u32 FEW = HALVES / 2, MANY = (HALVES + 1) / 2;
  // Nodes in front of even positions, the most that there are; and in front of odd ones.
  static constexpr u32 NODES = 1u << (16 - FEW), NODES_ODD = 1u << (16 - MANY);
  // A thread's states: CHOICES new bits (every SHARE-th) of PER nodes in front of odd positions that follow each other.
  static constexpr u32 SHARE = NODES_ODD < WORKERS ? WORKERS / NODES_ODD : 1;
  static constexpr u32 PER = NODES_ODD * SHARE / WORKERS, CHOICES = (1u << MANY) / SHARE;
  // Copies of the costs in shared memory: two, or one that is written when all have read it, or none where none fits.
  static constexpr u32 COPIES = NODES <= 8192 ? 2 : NODES <= 16384 ? 1 : 0;
  static constexpr u32 AT_ONCE = COPIES == 1 ? PER : PER < GROUP ? PER : GROUP;
  // Choices whose values are read at once. More than a few at a time cost registers that are not there.
  static constexpr u32 INNER = AT_ONCE < 8 ? 8 / AT_ONCE : 1, UNROLLED = MANY <= 4 && AT_ONCE <= GROUP ? CHOICES : MANY > 4 ? 4 : 2;

  const u16* codes;
  const Eight* mine;
  const float* target;
  float *history, *shared;
  u32 turn;

  DEVICE u32 node() const { return threadIdx.x / SHARE * PER; }
  DEVICE u32 choice(u32 i) const { return i * SHARE + threadIdx.x % SHARE; }

  DEVICE float* in_front_of(u32 position) { return history + (u64)(position % RING) * NODES; }
  DEVICE float* copy(u32 which) { return shared + (COPIES == 2 ? which * NODES : 0); }

  // Sets the costs in front of a position: all the same, but for one node.
  DEVICE void begin(u32 position, float all, u32 one, float its) {
    __syncthreads();
    turn = 0;
    for (u32 i = threadIdx.x; i < NODES; i += WORKERS) {
      float cost = i == one ? its : all;
      if (COPIES > 0) copy(0)[i] = cost;
      in_front_of(position)[i] = cost;
    }
    __syncthreads();
  }

  // The step of a position with IN new bits; ODD: the next has the many. `keep`: the way back will pass.
  template <u32 IN, bool ODD> DEVICE void step(u32 position, bool keep) {
    const float x = target[position % RING];
    const float* from = COPIES > 0 ? copy(turn) : in_front_of(position);
    float* to = copy(1 - turn);
    float* kept = in_front_of(position + 1);
    // In front of an even position there are twice as many nodes, if the steps differ: the lowest new bit is their highest.
    constexpr u32 SIDES = ODD || FEW == MANY ? 1 : 2;
    constexpr u32 SAME = AT_ONCE >> IN > 0 ? 1u << IN : AT_ONCE;
#pragma unroll 1
    for (u32 first = 0; first < PER; first += AT_ONCE) {
      float best[SIDES][AT_ONCE];
      Eight eight;
      float cost = 0.0f;
#pragma unroll
      for (u32 s = 0; s < SIDES; s++) {
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) best[s][j] = infinity();
      }
#pragma unroll UNROLLED
      for (u32 i = 0; i < CHOICES; i += INNER) {
#pragma unroll
        for (u32 m = 0; m < INNER * AT_ONCE; m++) {
          const u32 which = i + m / AT_ONCE, k = m % AT_ONCE;
          if (m % 8 == 0) eight = mine[(first * CHOICES + i * AT_ONCE + m) / 8 * WORKERS + threadIdx.x];
          // Of nodes side by side, those that differ in what the state before forgets come from one.
          if (k % SAME == 0) cost = from[choice(which) << (16 - MANY - IN) | (node() + first + k) >> IN];
          float a, b;
          two_halves(eight.pairs[m % 8 / 2], a, b);
          float error = (m % 2 ? b : a) - x;
          float& least_yet = best[SIDES == 2 ? which % 2 : 0][k];
          least_yet = least(fma_rn(error, error, cost), least_yet);
        }
      }
      if (SHARE > 1) {
#pragma unroll
        for (u32 mask = 1; mask < SHARE; mask *= 2) best[0][0] = least(best[0][0], __shfl_xor_sync(ALL, best[0][0], mask));
      }
      // One copy: nobody reads it any more.
      if (COPIES == 1) __syncthreads();
#pragma unroll
      for (u32 s = 0; s < SIDES; s++) {
        u32 at = s << (16 - MANY) | (node() + first);
        if constexpr (AT_ONCE % 4 == 0) {
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; j += 4) {
            Float4 four = {{best[s][j], best[s][j + 1], best[s][j + 2], best[s][j + 3]}};
            if (COPIES > 0) *(Float4*)(to + at + j) = four;
            if (COPIES == 0 || keep) *(Float4*)(kept + at + j) = four;
          }
        } else {
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; j++) {
            if (SHARE > 1 && threadIdx.x % SHARE != 0) continue;
            if (COPIES > 0) to[at + j] = best[s][j];
            if (COPIES == 0 || keep) kept[at + j] = best[s][j];
          }
        }
      }
    }
    __syncthreads();
    turn = 1 - turn;
  }

  // Of the lanes' costs the least, of equal ones that with the least index.
  DEVICE static void best_of_warp(float& cost, u32& index) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
      float c = __shfl_xor_sync(ALL, cost, mask);
      u32 i = __shfl_xor_sync(ALL, index, mask);
      bool take = c < cost || (c == cost && i < index);
      cost = take ? c : cost;
      index = take ? i : index;
    }
  }

  // The cheapest node in front of an even position. For one warp.
  DEVICE u32 cheapest(u32 position) {
    const float* costs = in_front_of(position);
    float cost = infinity();
    u32 index = lane();
    for (u32 i = lane(); i < NODES; i += 32) {
      if (costs[i] < cost) {
        cost = costs[i];
        index = i;
      }
    }
    best_of_warp(cost, index);
    return index;
  }

  // Walks back from a node behind position `last`, which is odd, to the one in front of position 0. For one warp.
  DEVICE u32 back(u32 last, u32 node, u16* states) {
    for (u32 left = last + 1; left > 0; left--) {
      u32 position = left - 1;
      u32 in = position % 2 ? MANY : FEW, out = position % 2 ? FEW : MANY;
      const float* costs = in_front_of(position);
      float cost = infinity();
      u32 index = lane();
      for (u32 i = lane(); i < 1u << out; i += 32) {
        u32 state = i << (16 - out) | node;
        float error = half_to_float(codes[state]) - target[position];
        float mine = fma_rn(error, error, costs[state >> in]);
        if (mine < cost) {
          cost = mine;
          index = i;
        }
      }
      best_of_warp(cost, index);
      u32 state = index << (16 - out) | node;
      if (states && lane() == 0) states[position] = (u16)state;
      node = state >> in;
    }
    return node;
  }
};

// Encodes `tiles` tiles of 256 targets in ring order. `history` has room for the costs of a tile, 256 times 2^(16 - bits),
// for each block.
template <u32 HALVES>
DEVICE void encode(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  SHARED_BYTES(room);
  SHARED float target[RING];
  SHARED u32 seam;
  Trellis<HALVES> t;
  t.codes = codes;
  t.mine = (const Eight*)mine;
  t.target = target;
  t.history = history + (u64)blockIdx.x * RING * Trellis<HALVES>::NODES;
  t.shared = (float*)room;
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    __syncthreads();
    if (threadIdx.x < RING) target[threadIdx.x] = targets[(u64)tile * RING + threadIdx.x];
    // From half way round with every state allowed, to learn which node crosses the seam in front of position 0.
    t.begin(RING / 2, 0.0f, 0, 0.0f);
    for (u32 p = RING / 2; p < RING + RING / 2; p += 2) {
      // No way back leads through the part in front of the seam.
      t.template step<Trellis<HALVES>::FEW, true>(p, p + 1 >= RING);
      t.template step<Trellis<HALVES>::MANY, false>(p + 1, p + 2 >= RING);
    }
    if (warp() == 0) {
      u32 node = t.back(RING / 2 - 1, t.cheapest(RING / 2), nullptr);
      if (lane() == 0) seam = node;
    }
    __syncthreads();
    // Then round the ring from this node to this node.
    t.begin(0, infinity(), seam, 0.0f);
    for (u32 p = 0; p < RING - 2; p += 2) {
      t.template step<Trellis<HALVES>::FEW, true>(p, true);
      t.template step<Trellis<HALVES>::MANY, false>(p + 1, true);
    }
    t.template step<Trellis<HALVES>::FEW, true>(RING - 2, true);
    if (warp() == 0) t.back(RING - 1, seam, states + (u64)tile * RING);
  }
}

KERNEL THREADS(1024) encode_2(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<2>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_3(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<3>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_4(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<4>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_5(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<5>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_6(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<6>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_7(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<7>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_8(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<8>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_10(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<10>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_12(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<12>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_14(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<14>(targets, codes, mine, history, states, tiles);
}
KERNEL THREADS(1024) encode_16(const float* targets, const u16* codes, const u8* mine, float* history, u16* states, u32 tiles) {
  encode<16>(targets, codes, mine, history, states, tiles);
}
