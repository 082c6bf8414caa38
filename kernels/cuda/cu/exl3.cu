// Products with weights in EXL3: matrices put together of segments, each a trellis of 16 x 16 tiles with scales of its own.
//
// What is done to a row: H(x * suh), rounded to half; products with the tiles; H(columns) * svh + bias. A wave of segments
// (those whose results do not add to one another's) is
// - one launch at one row, `exl3_one_1` and `exl3_one_2`: every block rotates the row for itself, and of the blocks that
//   share 128 columns the last takes over the others' sums and brings them back;
// - at more rows `exl3_rotate`, `exl3_rows_1` or `exl3_rows_2` (a tile is decoded once for up to 8 rows) or, from many rows
//   on, `exl3_tile` (exl3_tile.cu), then `exl3_finish`.
// `_1`: a warp takes the left or right half of a column of tiles, so that there are enough warps; `_2`: both halves. In
// `exl3_one_1` four warps share a half, a chain each.
//
// Words of tiles come through a ring in shared memory, some steps ahead. Each lane cuts the states of four ring positions
// of a half out of the words of a tile, hashes them to code values in registers, and adds their products to one sum a row.
// Products of halves are exact; a sum is a chain of 1,024 of k, and chains are added in rising order. Bound: the bytes of the words, and the rate at
// which states become numbers: at 4 bits about 7 instructions a weight, of which a third of the memory's rate leaves 12.

#define ROTATED_AT_ONCE 8

// Blocks of 128 channels `first`, `first + every`, .. below `end` of a row: H(x * suh), rounded to half, in the order in which a
// tile's lanes read it. By a warp; tile t goes to `out + t * tile`.
DEVICE void rotate(const Segment& s, const float* x, const u16* suh, u32 first, u32 every, u32 end, float* out, u64 tile) {
  for (u32 base = first; base < end; base += ROTATED_AT_ONCE * every) {
    float v[ROTATED_AT_ONCE][4];
    // All loads, then all sums: a warp has the latency of memory once.
#pragma unroll
    for (u32 i = 0; i < ROTATED_AT_ONCE; i++) {
      u32 block = base + i * every;
      if (block < end) {
        u64 scales = ((const u64*)suh)[block * 32 + lane()];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          u32 channel = block * 128 + 4 * lane() + j;
          bool there = channel >= s.lead && channel - s.lead < s.inputs;
          v[i][j] = (there ? x[channel - s.lead] : 0.0f) * half_to_float((u16)(scales >> 16 * j));
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < ROTATED_AT_ONCE; i++) {
      u32 block = base + i * every;
      if (block < end) {
        hadamard<4>(v[i], 0.08838834764831845f);
        float* to = out + (block * 8 + lane() / 4) * tile;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          // Row r of a tile belongs to lanes i = r % 8 / 2 (modulo 4) and their ring position r % 2 + 2 * (r / 8).
          u32 r = 4 * (lane() % 4) + j;
          to[r % 8 / 2 * 4 + r % 2 + r / 8 * 2] = half_to_float(float_to_half(v[i][j]));
        }
      }
    }
  }
}

// A warp a block of 128 channels of a row, to [segment][tile of k][row][16].
KERNEL THREADS(128) exl3_rotate(Rows rows, Wave wave) {
  u32 at = blockIdx.x, block = blockIdx.y * 4 + warp();
  Tile tile = tile_of(rows, at, 1);
  Segment s;
  u32 rotation;
  if (tile.count == 0 || !wave.find(tile.matrix, s, rotation) || block * 128 >= s.k || rotation != blockIdx.z) return;
  float* out = wave.rotated + (u64)blockIdx.z * rows.count * wave.k + at * 16;
  rotate(s, rows.input(tile.first) + s.input, (const u16*)wave.segments.line(s.suh), block, 1, block + 1, out, rows.count * 16);
}

// Rates: four bits a weight; up to five, so that 32 bits hold a lane's four states of a half; any.
enum Rate : u32 { FOUR = 0, NARROW = 1, WIDE = 2 };

// Warps that share a column or a half of one where outputs are few, each every fourth chain.
#define SHARES 4
#define STAGE_WORDS 256
// Tiles of a stage: at most 64 pieces of 16 bytes, two a lane.
DEVICE constexpr u32 stage_tiles(u32 rate) { return rate == FOUR ? 8 : 4; }

// The words of a column of tiles on their way to a warp: all chains, or of every SPLIT chains the one that is its share.
template <int SPLIT> struct Ring {
  // Several times as many warps have as many words on their way with half the stages.
  enum : u32 { STAGES = SPLIT > 1 ? 4 : 8, WORDS = STAGES * STAGE_WORDS };
  u32* at;
  // Stages that are not asked for yet; where the next one goes, and where the next to be read lies.
  u32 left, put, get;
  // Where a lane's pieces come from, and go to in a stage.
  const u8* from[2];
  bool mine[2];
  u64 stride, jump;
  // Stages of a chain, and of them those that are not asked for yet.
  u32 chain, until;

  DEVICE Ring(const Segment& s, const u8* trellis, u32 column, u32 share, u32* own) {
    u32 tiles = stage_tiles(s.halves == 8 ? FOUR : WIDE), whole = s.k / 16 / CHAIN, rest = s.k / 16 % CHAIN;
    at = own;
    chain = until = CHAIN / tiles;
    left = whole > share ? (whole - share + SPLIT - 1) / SPLIT * chain : 0;
    if (whole % SPLIT == share) left += rest / tiles;
    put = get = 0;
    u64 row = (u64)(s.n / 16) * s.halves * 16;
    stride = row * tiles;
    jump = row * CHAIN * (SPLIT - 1);
    trellis += row * CHAIN * share;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      u32 piece = lane() + 32 * i;
      mine[i] = piece < tiles * s.halves;
      from[i] = trellis + (u64)column * s.halves * 16 + piece / s.halves * row + piece % s.halves * 16;
    }
#pragma unroll 1
    for (u32 i = 0; i + 1 < STAGES; i++) fetch();
  }

  // Starts the copy of the next stage, if there is one left.
  DEVICE void fetch() {
    if (left > 0) {
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        if (mine[i]) copy_async(at + put * STAGE_WORDS + (lane() + 32 * i) * 4, from[i]);
        from[i] += stride;
      }
      if (SPLIT > 1 && --until == 0) {
        until = chain;
#pragma unroll
        for (u32 i = 0; i < 2; i++) from[i] += jump;
      }
      left--;
    }
    put = (put + 1) % STAGES;
    copy_commit();
  }

  // The words of the next stage, when they are there.
  DEVICE const u32* next() {
    copy_wait<STAGES - 2>();
    __syncwarp();
    // Into the stage that all lanes have left.
    fetch();
    const u32* words = at + get * STAGE_WORDS;
    get = (get + 1) % STAGES;
    return words;
  }
};

// How a lane finds its states in the words of a tile, of which a warp takes HALVES halves from `half` on.
template <u32 CODE, u32 RATE, int HALVES> struct Cut {
  u32 words;
  // A window begins where the first of a lane's four states of a half begins: its words, and the bit in the first.
  u32 a[HALVES], b[HALVES], c[HALVES], shift[HALVES];
  // From one state to the next: the same for all lanes, since their first positions are even.
  u32 d1, d2, d3;

  DEVICE Cut(u32 halves, u32 half) {
    words = RATE == FOUR ? 32 : 4 * halves;
#pragma unroll
    for (u32 h = 0; h < HALVES; h++) {
      u32 start = (end_bit(halves, 8 * lane() + 4 * (half + h)) + 32 * words - 16) % (32 * words);
      shift[h] = start % 32;
      a[h] = start / 32;
      b[h] = (a[h] + 1) % words;
      c[h] = (a[h] + 2) % words;
    }
    d1 = end_bit(halves, 1) - end_bit(halves, 0);
    d2 = end_bit(halves, 2) - end_bit(halves, 0);
    d3 = end_bit(halves, 3) - end_bit(halves, 0);
  }

  // The code values of a lane in a tile.
  DEVICE void values(const u32* w, float (&v)[HALVES][4]) const {
    if constexpr (RATE == FOUR && HALVES == 2) {
      // State e of the lane's eight ends with bit 4 e + 4 of its word; the first three begin in the word before.
      u32 now = w[lane()], before = w[(lane() + 31) % 32], between = funnel(before, now, 28);
      values_of<CODE>(funnel(before, now, 20) >> 16, funnel(before, now, 24) >> 16, v[0][0], v[0][1]);
      values_of<CODE>(between >> 16, now >> 16, v[0][2], v[0][3]);
      values_of<CODE>(bytes_of(between, 0, 0x4421), bytes_of(now, 0, 0x4421), v[1][0], v[1][1]);
      values_of<CODE>(between & 0xffffu, now & 0xffffu, v[1][2], v[1][3]);
    } else {
#pragma unroll
      for (u32 h = 0; h < HALVES; h++) {
        u32 first = w[a[h]], second = w[b[h]], high = funnel(first, second, shift[h]);
        if constexpr (RATE == FOUR) {
          u32 next = funnel(first, second, shift[h] + 4);
          values_of<CODE>(high >> 16, next >> 16, v[h][0], v[h][1]);
          values_of<CODE>(bytes_of(high, 0, 0x4421), bytes_of(next, 0, 0x4421), v[h][2], v[h][3]);
        } else if constexpr (RATE == NARROW) {
          values_of<CODE>(high >> 16, high >> (16 - d1) & 0xffffu, v[h][0], v[h][1]);
          values_of<CODE>(high >> (16 - d2) & 0xffffu, high >> (16 - d3) & 0xffffu, v[h][2], v[h][3]);
        } else {
          u32 more = funnel(second, w[c[h]], shift[h]);
          values_of<CODE>(high >> 16, funnel(high, more, d1) >> 16, v[h][0], v[h][1]);
          values_of<CODE>(funnel(high, more, d2) >> 16, funnel(high, more, d3) >> 16, v[h][2], v[h][3]);
        }
      }
    }
  }
};

// The next `count` tiles of a column, a multiple of 8 from the start of a chain on, times R rows of x, whose tile t of row r lies
// at x + t * tile + r * 16. What each chain gives is added to `total`.
template <int R, int HALVES, int SPLIT> struct Multiply {
  Ring<SPLIT>& ring;
  u32 halves, half, count;
  const float* x;
  u64 tile;
  float (&total)[R][HALVES];

  template <u32 CODE, u32 RATE> DEVICE void at_rate() {
    const Cut<CODE, RATE, HALVES> cut(halves, half);
    const float* mine = x + lane() % 4 * 4;
    float sum[R][HALVES];
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
      for (u32 h = 0; h < HALVES; h++) sum[r][h] = 0.0f;
    }
#pragma unroll 1
    for (u32 first = 0; first < count; first += stage_tiles(RATE)) {
      const u32* w = ring.next();
#pragma unroll (R == 1 ? 8 : R == 2 ? 4 : 2)
      for (u32 t = 0; t < stage_tiles(RATE); t++) {
        float v[HALVES][4];
        cut.values(w + t * cut.words, v);
#pragma unroll
        for (int r = 0; r < R; r++) {
          Float4 four = *(const Float4*)(mine + r * 16);
#pragma unroll
          for (u32 h = 0; h < HALVES; h++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum[r][h] = fma_rn(v[h][e], four.v[e], sum[r][h]);
          }
        }
        mine += tile;
      }
      u32 next = first + stage_tiles(RATE);
      if (next % CHAIN == 0 || next >= count) {
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
          for (u32 h = 0; h < HALVES; h++) {
            total[r][h] = total[r][h] + sum[r][h];
            sum[r][h] = 0.0f;
          }
        }
      }
    }
  }
  template <u32 CODE> DEVICE void with() {
    if (halves == 8) at_rate<CODE, FOUR>();
    // Several rows have the time for the slower cut.
    else if (R == 1 && halves <= 10) at_rate<CODE, R == 1 ? NARROW : WIDE>();
    else at_rate<CODE, WIDE>();
  }
  // Codebook and rate are known to the code that runs.
  DEVICE void run(u32 codebook) {
    if (codebook == MUL1) with<MUL1>();
    else if (codebook == MCG) with<MCG>();
    else with<THREE_INST>();
  }
};

// What a warp takes: HALVES halves of a column of tiles. A block has four, all of one segment; more warps share them.
template <int HALVES> struct Part {
  u32 column, half;
  DEVICE Part() {
    u32 unit = (blockIdx.x * 4 + warp() % 4) * HALVES;
    column = unit / 2;
    half = unit % 2;
  }
  // Sums of R rows, of which `count` are wanted: the four lanes that share a column have a part each. `put(r, column, sum)` takes them.
  template <int R, class F> DEVICE void store(const float (&sum)[R][HALVES], u32 count, F put) const {
#pragma unroll
    for (u32 r = 0; r < R; r++) {
#pragma unroll
      for (u32 h = 0; h < HALVES; h++) {
        float v = sum[r][h] + __shfl_xor_sync(ALL, sum[r][h], 1);
        v = v + __shfl_xor_sync(ALL, v, 2);
        if (r < count && lane() % 4 == 0) put(r, 16 * column + 8 * (half + h) + lane() / 4, v);
      }
    }
  }
};

// Output scales of a lane's four of 128 columns.
DEVICE u64 scales_of(const Wave& wave, const Segment& s, u32 block) {
  return ((const u64*)wave.segments.line(s.svh))[block * 32 + lane()];
}

// 128 columns of a row, by a warp, a lane's four sums each: H(sums) * svh + bias, to the outputs.
DEVICE void finish(const Wave& wave, const Segment& s, u32 block, u64 scales, float (&v)[4], float* out) {
  hadamard<4>(v, 0.08838834764831845f);
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    u32 column = block * 128 + 4 * lane() + j;
    float value = v[j] * half_to_float((u16)(scales >> 16 * j));
    if (s.bias != NO_LINE) value = value + ((const float*)wave.segments.line(s.bias))[column];
    if (column >= s.skip && column - s.skip < s.outputs) {
      float* to = out + s.output + column - s.skip;
      *to = s.input > 0 ? *to + value : value;
    }
  }
}

// Channels that a block of `one` rotates at a time: a chain for each share.
#define CHUNK 4096

// One row of a matrix, or of each of several, by a block of 4 * SPLIT warps. Dynamic shared memory: CHUNK numbers, then a ring a
// warp.
template <int HALVES, int SPLIT> DEVICE void one(const Rows& rows, const Wave& wave) {
  SHARED_BYTES(shared);
  Tile tile = tile_of(rows, blockIdx.y, 1);
  Segment s;
  u32 rotation;
  if (tile.count == 0 || !wave.find(tile.matrix, s, rotation) || blockIdx.x * 32 * HALVES >= s.n) return;
  float* rotated = (float*)shared;
  const Part<HALVES> part;
  const u32 share = SPLIT > 1 ? warp() / 4 : 0;
  Ring<SPLIT> ring(s, wave.segments.line(s.data), part.column, share, (u32*)(rotated + CHUNK) + warp() * Ring<SPLIT>::WORDS);
  // The blocks of 128 columns that share sums, and the scales that the last of them needs.
  const u32 sharers = 4 / HALVES, block = blockIdx.x / sharers;
  const bool last = blockIdx.x % sharers == sharers - 1, finishes = last && warp() == 0;
  const u64 scales = finishes ? scales_of(wave, s, block) : 0;
  float* out = finishes ? rows.output(tile.first) : nullptr;
  const float* x = rows.input(tile.first) + s.input;
  const u16* suh = (const u16*)wave.segments.line(s.suh);
  float total[1][HALVES];
#pragma unroll
  for (u32 h = 0; h < HALVES; h++) total[0][h] = NO_CHAINS;
#pragma unroll 1
  for (u32 first = 0; first < s.k; first += CHUNK) {
    u32 count = low(CHUNK, s.k - first);
    if (first > 0) __syncthreads();
    rotate(s, x, suh, first / 128 + warp(), 4 * SPLIT, (first + count) / 128, rotated - first, 16);
    __syncthreads();
    if constexpr (SPLIT == 1) {
      Multiply<1, HALVES, 1>{ring, s.halves, part.half, count / 16, rotated, 16, total}.run(s.codebook);
    } else {
      // A share's chain of this chunk; then those of the first share add all of them.
      SHARED float s_chains[SPLIT][4][HALVES][32];
      u32 chains = (count / 16 + CHAIN - 1) / CHAIN;
      if (share < chains) {
        float sum[1][HALVES];
#pragma unroll
        for (u32 h = 0; h < HALVES; h++) sum[0][h] = NO_CHAINS;
        u32 tiles = low(CHAIN, count / 16 - share * CHAIN);
        Multiply<1, HALVES, SPLIT>{ring, s.halves, part.half, tiles, rotated + share * CHAIN * 16, 16, sum}.run(s.codebook);
#pragma unroll
        for (u32 h = 0; h < HALVES; h++) s_chains[share][warp() % 4][h][lane()] = sum[0][h];
      }
      __syncthreads();
      if (share == 0) {
        for (u32 i = 0; i < chains; i++) {
#pragma unroll
          for (u32 h = 0; h < HALVES; h++) total[0][h] = total[0][h] + s_chains[i][warp()][h][lane()];
        }
      }
    }
  }
  // The last of the blocks of 128 columns takes the sums of the others, and has its own in shared memory.
  SHARED float s_own[32 * HALVES];
  u64* handed = wave.handed + ((u64)blockIdx.z * rows.count + blockIdx.y) * wave.n;
  if (share == 0) {
    part.template store<1>(total, 1, [=](u32, u32 column, float v) {
      if (last) s_own[column % (32 * HALVES)] = v;
      else hand_over(handed + column, v);
    });
  }
  if (!last) return;
  __syncthreads();
  if (!finishes) return;
  float v[4];
  const u32 from = 4 * lane(), own = 128 - 32 * HALVES;
  if (from >= own) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) v[j] = s_own[from - own + j];
  } else {
    take_over(handed + block * 128 + from, 1, 4, v);
  }
  __syncwarp();
  finish(wave, s, block, scales, v, out);
}

KERNEL THREADS(512) exl3_one_1(Rows rows, Wave wave) { one<1, SHARES>(rows, wave); }
// Four blocks a multiprocessor, as their shared memory allows.
KERNEL THREADS(128, 4) exl3_one_2(Rows rows, Wave wave) { one<2, 1>(rows, wave); }

#define MOST_ROWS 8

template <int R, int HALVES>
DEVICE void some_rows(const Segment& s, const Part<HALVES>& part, Ring<1>& ring, const float* x, u64 x_tile, float* raw, u64 stride, u32 count) {
  float total[R][HALVES];
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (u32 h = 0; h < HALVES; h++) total[r][h] = NO_CHAINS;
  }
  Multiply<R, HALVES, 1>{ring, s.halves, part.half, s.k / 16, x, x_tile, total}.run(s.codebook);
  part.template store<R>(total, count, [=](u32 r, u32 column, float v) { raw[r * stride + column] = v; });
}

// Up to 8 rows: as many as the tile has, rounded up to 2, 4 or 8. Dynamic shared memory: four rings.
template <int HALVES> DEVICE void some(const Rows& rows, const Wave& wave) {
  SHARED_BYTES(shared);
  Tile tile = tile_of(rows, blockIdx.y, MOST_ROWS);
  Segment s;
  u32 rotation;
  if (tile.count == 0 || !wave.find(tile.matrix, s, rotation) || blockIdx.x * 32 * HALVES >= s.n) return;
  const Part<HALVES> part;
  Ring<1> ring(s, wave.segments.line(s.data), part.column, 0, (u32*)shared + warp() * Ring<1>::WORDS);
  u64 at = tile.first - rows.first, x_tile = rows.count * 16, stride = wave.n;
  // Rows beyond the tile's are read and not stored.
  const float* x = wave.rotated + (u64)rotation * rows.count * wave.k + at * 16;
  float* raw = wave.raw + ((u64)blockIdx.z * rows.count + at) * wave.n;
  if (tile.count <= 2) some_rows<2, HALVES>(s, part, ring, x, x_tile, raw, stride, tile.count);
  else if (tile.count <= 4) some_rows<4, HALVES>(s, part, ring, x, x_tile, raw, stride, tile.count);
  else some_rows<8, HALVES>(s, part, ring, x, x_tile, raw, stride, tile.count);
}

// Rotated rows have room for 7 more at the end of the scratch, so that a short tile may read a full one's.
KERNEL THREADS(128) exl3_rows_1(Rows rows, Wave wave) { some<1>(rows, wave); }
KERNEL THREADS(128, 3) exl3_rows_2(Rows rows, Wave wave) { some<2>(rows, wave); }

// `split`: whether sums are there whole (1), or the parts of the four lanes that share a column (4).
KERNEL THREADS(128) exl3_finish(Rows rows, Wave wave, u32 split) {
  u32 at = blockIdx.x, block = blockIdx.y * 4 + warp();
  Tile tile = tile_of(rows, at, 1);
  Segment s;
  u32 rotation;
  if (tile.count == 0 || !wave.find(tile.matrix, s, rotation) || block * 128 >= s.n) return;
  const u64 of = (u64)rows.count * wave.n;
  const float* raw = wave.raw + blockIdx.z * split * of + (u64)at * wave.n + block * 128 + 4 * lane();
  float v[4];
  if (split == 1) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) v[j] = raw[j];
  } else {
    Float4 part[4];
#pragma unroll
    for (u32 p = 0; p < 4; p++) part[p] = *(const Float4*)(raw + p * of);
#pragma unroll
    for (u32 j = 0; j < 4; j++) v[j] = (part[0].v[j] + part[1].v[j]) + (part[2].v[j] + part[3].v[j]);
  }
  finish(wave, s, block, scales_of(wave, s, block), v, rows.output(tile.first));
}

// The bias of a whole product, after all segments. A thread an output.
KERNEL THREADS(128) exl3_bias(Rows rows, const float* bias, u32 n) {
  u32 column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= n) return;
  float* out = rows.output(rows.first + blockIdx.x) + column;
  *out = *out + bias[column];
}

// The rate of decoding, for `plugfold bench roofline`: every warp turns eight tiles of 4 bits a weight in shared memory into
// code values and multiplies them, again and again, as a product of one row does whose words have all come.
KERNEL THREADS(128) exl3_decoding(u32 turns, u32 mask, const u32* words, float* out) {
  SHARED u32 s_words[4][STAGE_WORDS];
  SHARED float s_x[STAGE_WORDS / 2];
  for (u32 i = threadIdx.x; i < 4 * STAGE_WORDS; i += blockDim.x) s_words[i / STAGE_WORDS][i % STAGE_WORDS] = words[i];
  for (u32 i = threadIdx.x; i < STAGE_WORDS / 2; i += blockDim.x) s_x[i] = 1.0f / (float)(i + 1);
  __syncthreads();
  const Cut<MUL1, FOUR, 2> cut(8, 0);
  const float* mine = s_x + lane() % 4 * 4;
  float sum[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (u32 turn = 0; turn < turns; turn++) {
    // `mask` is 0, which the compiler cannot know: words and inputs are read anew each time.
    const u32* w = s_words[warp()] + (turn & mask);
    const float* x = mine + 4 * (turn & mask);
#pragma unroll
    for (u32 t = 0; t < stage_tiles(FOUR); t++) {
      float v[2][4];
      cut.values(w + t * cut.words, v);
      Float4 four = *(const Float4*)(x + t * 16);
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[h] = fma_rn(v[h][e], four.v[e], sum[h]);
      }
    }
  }
  if (sum[0] == 1.0f && sum[1] == 2.0f) *out = sum[0];
}
