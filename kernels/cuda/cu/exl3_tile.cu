// Products of many rows with weights in EXL3: between `exl3_rotate` and `exl3_finish` of exl3.cu, which has the order of sums.
//
// The four lanes that share a column there sum a quarter of each tile's rows, and are added last. Here a block takes one such quarter:
// 128 columns of up to 64 rows, 8 by 8 a thread. Code values and rows come through shared memory, four tiles of k at a time, in two
// stages: while one is multiplied, threads fetch the next one's words and rows, and then cut the states out of the words and store
// what they decode to. Sums of a chain of 1,024 of k go to those before them in memory. Bound: the rate of multiply-adds.

#define HEIGHT 64
#define WIDTH 128
// Tiles of k of a stage, of which a thread decodes a column each.
#define STAGE_TILES 4
// Numbers of a row or column in a stage.
#define DEPTH (4 * STAGE_TILES)
// Tiles of k of a row that a thread brings.
#define ROW_TILES 2

// The code values of four states of a tile.
DEVICE void decoded(u32 codebook, u32 a, u32 b, u32 c, u32 d, float (&v)[4]) {
  if (codebook == MUL1) {
    values_of<MUL1>(a, b, v[0], v[1]);
    values_of<MUL1>(c, d, v[2], v[3]);
  } else if (codebook == MCG) {
    values_of<MCG>(a, b, v[0], v[1]);
    values_of<MCG>(c, d, v[2], v[3]);
  } else {
    values_of<THREE_INST>(a, b, v[0], v[1]);
    values_of<THREE_INST>(c, d, v[2], v[3]);
  }
}

KERNEL THREADS(128, 2) exl3_tile(Rows rows, Wave wave) {
  SHARED float s_x[2][DEPTH][HEIGHT], s_w[2][DEPTH][WIDTH];
  const u32 quarter = blockIdx.x % 4, first = blockIdx.x / 4 * WIDTH;
  const Tile tile = tile_of(rows, blockIdx.y, HEIGHT);
  Segment s;
  u32 rotation;
  if (tile.count == 0 || !wave.find(tile.matrix, s, rotation) || first >= s.n) return;
  const u32 at = tile.first - rows.first, tiles = s.k / 16, words = 4 * s.halves;
  // What this thread brings of a stage: the values of a column, and four numbers of a row of every second tile.
  const u32 column = threadIdx.x, row = threadIdx.x % HEIGHT, half = threadIdx.x / HEIGHT;
  const u32* from = (const u32*)wave.segments.line(s.data) + (u64)(first + column) / 16 * words;
  const u32 next_tile = s.n / 16 * words;
  // Where the first of the four states begins in the words of a tile, and how far the others are from it.
  const u32 start = (end_bit(s.halves, 32 * (column % 8) + 8 * quarter + 4 * (column % 16 / 8)) + 32 * words - 16) % (32 * words);
  const u32 shift = start % 32, a = start / 32, b = (a + 1) % words, c = (a + 2) % words, d0 = end_bit(s.halves, 0);
  const u32 d1 = end_bit(s.halves, 1) - d0, d2 = end_bit(s.halves, 2) - d0, d3 = end_bit(s.halves, 3) - d0;
  const u32 x_tile = rows.count * 16;
  const float* x = wave.rotated + (u64)rotation * rows.count * wave.k + (u64)(at + low(row, tile.count - 1)) * 16 + 4 * quarter + half * x_tile;
  u32 w[STAGE_TILES][3];
  Float4 brought[ROW_TILES];
  // The next stage.
  auto fetch = [&] {
#pragma unroll
    for (u32 i = 0; i < STAGE_TILES; i++) {
      w[i][0] = from[a];
      w[i][1] = from[b];
      w[i][2] = from[c];
      from += next_tile;
    }
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i++) {
      brought[i] = *(const Float4*)x;
      x += (u64)2 * x_tile;
    }
  };
  auto store = [&](u32 stage) {
#pragma unroll
    for (u32 i = 0; i < STAGE_TILES; i++) {
      const u32 high = funnel(w[i][0], w[i][1], shift), more = funnel(w[i][1], w[i][2], shift);
      float v[4];
      decoded(s.codebook, high >> 16, funnel(high, more, d1) >> 16, funnel(high, more, d2) >> 16, funnel(high, more, d3) >> 16, v);
#pragma unroll
      for (u32 e = 0; e < 4; e++) s_w[stage][4 * i + e][column] = v[e];
    }
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i++) {
#pragma unroll
      for (u32 e = 0; e < 4; e++) s_x[stage][4 * (2 * i + half) + e][row] = brought[i].v[e];
    }
  };
  // What it computes: rows 4 y .. of each 32, columns 4 z .. of each 64.
  const u32 y = threadIdx.x / 16, z = threadIdx.x % 16;
  float acc[8][8];
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
#pragma unroll
    for (u32 j = 0; j < 8; j++) acc[i][j] = 0.0f;
  }
  float* sums = wave.raw + ((u64)blockIdx.z * 4 + quarter) * rows.count * wave.n + (u64)at * wave.n + first + 4 * z;
  fetch();
  store(0);
  __syncthreads();
#pragma unroll 1
  for (u32 t = 0; t < tiles; t += STAGE_TILES) {
    const u32 stage = t / STAGE_TILES % 2;
    const bool more = t + STAGE_TILES < tiles;
    if (more) fetch();
#pragma unroll
    for (u32 k = 0; k < DEPTH; k++) {
      Float4 p[2], q[2];
#pragma unroll
      for (u32 i = 0; i < 2; i++) p[i] = *(const Float4*)&s_x[stage][k][32 * i + 4 * y];
#pragma unroll
      for (u32 j = 0; j < 2; j++) q[j] = *(const Float4*)&s_w[stage][k][64 * j + 4 * z];
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
#pragma unroll
        for (u32 j = 0; j < 8; j++) acc[i][j] = fma_rn(q[j / 4].v[j % 4], p[i / 4].v[i % 4], acc[i][j]);
      }
    }
    if ((t + STAGE_TILES) % CHAIN == 0 || !more) {
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        const u32 r = i / 4 * 32 + 4 * y + i % 4;
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
          Float4* to = (Float4*)(sums + (u64)r * wave.n + 64 * j);
          Float4 sum;
          if (t >= CHAIN && r < tile.count) sum = *to;
#pragma unroll
          for (u32 e = 0; e < 4; e++) {
            const float v = acc[i][4 * j + e];
            sum.v[e] = t >= CHAIN ? sum.v[e] + v : NO_CHAINS + v;
            acc[i][4 * j + e] = 0.0f;
          }
          if (r < tile.count) *to = sum;
        }
      }
    }
    if (more) store(1 - stage);
    __syncthreads();
  }
}
