// Products with weights in EXL3: matrices put together of segments, each a trellis of 16 x 16 tiles with scales of its own.
//
// Three kernels a wave of segments (those whose results do not add to one another's):
// - `exl3_rotate`: H(x * suh), rounded to half, in the order in which a tile's lanes read it. A warp a block of 128 channels.
// - `exl3_product_1`: a warp takes the left or right half of a column of tiles, with `exl3_product_8` (up to 8 rows) both.
//   Each lane cuts the states of four ring positions of a half out of the words of a tile, hashes them to code values in registers, and adds their products to one sum a
//   row. Products of halves are exact, sums run down k. Bound: the bytes of the words at one row, and the rate at which
//   states become numbers (seven instructions each).
// - `exl3_finish`: H(columns) * svh + bias, to the outputs. A warp a block of 128 columns.

// What a launch covers: segments `part .. part + gridDim.z` of each matrix; scratch rows are `k` and `n` numbers wide.
struct Wave {
  Segments segments;
  u32 part, k, n, unused;
  float *rotated, *raw;

  DEVICE const Segment* segment(u32 matrix) const {
    const Segment* s = segments.of(matrix, part + blockIdx.z);
    return s && s->kind == SEGMENT_EXL3 ? s : nullptr;
  }
  // Where segment `part + z` of the block finds its rotated rows: neighbours with the same scales and inputs share them.
  DEVICE u32 rotation(const Segment* s) const {
    u32 z = blockIdx.z;
    while (z > 0) {
      const Segment* before = s - 1;
      if (before->kind != SEGMENT_EXL3 || before->suh != s->suh || before->input != s->input ||
          before->inputs != s->inputs || before->lead != s->lead) break;
      s = before;
      z--;
    }
    return z;
  }
};

KERNEL THREADS(128) exl3_rotate(Rows rows, Wave wave) {
  u32 at = blockIdx.x, block = blockIdx.y * 4 + warp();
  Tile tile = tile_of(rows, at, 1);
  const Segment* s = wave.segment(tile.matrix);
  if (tile.count == 0 || !s || block * 128 >= s->k || wave.rotation(s) != blockIdx.z) return;
  const float* x = rows.input(tile.first) + s->input;
  const u16* suh = (const u16*)wave.segments.line(s->suh);
  float v[4];
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    u32 channel = block * 128 + 4 * lane() + j;
    bool there = channel >= s->lead && channel - s->lead < s->inputs;
    v[j] = (there ? x[channel - s->lead] : 0.0f) * half_to_float(suh[channel]);
  }
  hadamard<4>(v, 0.08838834764831845f);
  float* out = wave.rotated + ((u64)blockIdx.z * rows.count + at) * wave.k;
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    // Row r of a tile belongs to lanes i = r % 8 / 2 (modulo 4) and their ring position r % 2 + 2 * (r / 8).
    u32 channel = block * 128 + 4 * lane() + j, r = channel % 16;
    out[channel / 16 * 16 + r % 8 / 2 * 4 + r % 2 + r / 8 * 2] = half_to_float(float_to_half(v[j]));
  }
}

enum Codebook : u32 { THREE_INST = 0, MCG = 1, MUL1 = 2 };

// The code value of a 16-bit state.
template <u32 CODE> DEVICE float value_of(u32 state) {
  if (CODE == MUL1) return half_fma(byte_sum(state * 0x83DCD12Du, 0x6400u), 0x1EEEu, 0xC931u);
  u32 x = CODE == MCG ? state * 0xCBAC1FEDu : state * 89226354u + 64248484u;
  return half_pair_sum((x & 0x8FFF8FFFu) ^ 0x3B603B60u);
}

// Ring bit just behind position p, `halves` being twice the bits a weight.
DEVICE u32 end_bit(u32 halves, u32 p) { return halves / 2 * (p + 1) + (halves & 1) * ((p + 1) / 2); }

// Words of tiles that are fetched before the ones at hand are used.
#define AHEAD 4

// Sums of R rows with the columns of HALVES halves of a tile, from `half` on. NARROW: up to five bits a weight, so that 32
// bits hold a lane's four states.
template <u32 CODE, bool NARROW, int R, int HALVES>
DEVICE void multiply(
    const Segment& s, const u32* trellis, u32 column, u32 half, const float* x, u64 x_stride, float (&sum)[R][HALVES]) {
  const u32 words = 4 * s.halves, ring = 32 * words, tiles = s.k / 16;
  // A window begins where the first of the lane's four states begins.
  u32 shift[HALVES], a[HALVES], b[HALVES], c[HALVES];
#pragma unroll
  for (u32 h = 0; h < HALVES; h++) {
    u32 start = (end_bit(s.halves, 8 * lane() + 4 * (half + h)) + ring - 16) % ring;
    shift[h] = start % 32;
    a[h] = start / 32;
    b[h] = (a[h] + 1) % words;
    c[h] = (a[h] + 2) % words;
  }
  // From one state to the next in a window: the same for all lanes, since their first positions are even.
  const u32 d1 = end_bit(s.halves, 1) - end_bit(s.halves, 0), d2 = end_bit(s.halves, 2) - end_bit(s.halves, 0),
            d3 = end_bit(s.halves, 3) - end_bit(s.halves, 0);
  const u64 step = (u64)(s.n / 16) * words;
  const u32* tile = trellis + (u64)column * words;
  x += lane() % 4 * 4;
  // [tile][half][word]
  u32 next[AHEAD][HALVES][NARROW ? 2 : 3];
  auto fetch = [&](u32 first) {
#pragma unroll
    for (u32 t = 0; t < AHEAD; t++) {
      const u32* w = tile + low(first + t, tiles - 1) * step;
#pragma unroll
      for (u32 h = 0; h < HALVES; h++) {
        next[t][h][0] = w[a[h]];
        next[t][h][1] = w[b[h]];
        if constexpr (!NARROW) next[t][h][2] = w[c[h]];
      }
    }
  };
  fetch(0);
#pragma unroll 1
  for (u32 first = 0; first < tiles; first += AHEAD) {
    u32 now[AHEAD][HALVES][NARROW ? 2 : 3];
#pragma unroll
    for (u32 t = 0; t < AHEAD; t++) {
#pragma unroll
      for (u32 h = 0; h < HALVES; h++) {
#pragma unroll
        for (u32 i = 0; i < (NARROW ? 2 : 3); i++) now[t][h][i] = next[t][h][i];
      }
    }
    if (first + AHEAD < tiles) fetch(first + AHEAD);
#pragma unroll
    for (u32 t = 0; t < AHEAD; t++) {
      // k is a multiple of 128, so tiles come in whole groups.
      float v[HALVES][4];
#pragma unroll
      for (u32 h = 0; h < HALVES; h++) {
        u32 high = funnel(now[t][h][0], now[t][h][1], shift[h]);
        v[h][0] = value_of<CODE>(high >> 16);
        if constexpr (NARROW) {
          v[h][1] = value_of<CODE>(high >> (16 - d1) & 0xffffu);
          v[h][2] = value_of<CODE>(high >> (16 - d2) & 0xffffu);
          v[h][3] = value_of<CODE>(high >> (16 - d3) & 0xffffu);
        } else {
          u32 more = funnel(now[t][h][1], now[t][h][2], shift[h]);
          v[h][1] = value_of<CODE>(funnel(high, more, d1) >> 16);
          v[h][2] = value_of<CODE>(funnel(high, more, d2) >> 16);
          v[h][3] = value_of<CODE>(funnel(high, more, d3) >> 16);
        }
      }
#pragma unroll
      for (int r = 0; r < R; r++) {
        Float4 four = *(const Float4*)(x + r * x_stride + (first + t) * 16);
#pragma unroll
        for (u32 h = 0; h < HALVES; h++) {
#pragma unroll
          for (int e = 0; e < 4; e++) sum[r][h] = fma_rn(v[h][e], four.v[e], sum[r][h]);
        }
      }
    }
  }
}

template <u32 CODE, int R, int HALVES>
DEVICE void at_rate(
    const Segment& s, const u32* trellis, u32 column, u32 half, const float* x, u64 x_stride, float (&sum)[R][HALVES]) {
  if (s.halves <= 10) multiply<CODE, true, R, HALVES>(s, trellis, column, half, x, x_stride, sum);
  else multiply<CODE, false, R, HALVES>(s, trellis, column, half, x, x_stride, sum);
}

// R rows; a warp takes HALVES halves of a column of tiles.
template <int R, int HALVES> DEVICE void product(const Rows& rows, const Wave& wave) {
  Tile tile = tile_of(rows, blockIdx.y, R);
  if (tile.count == 0) return;
  const Segment* found = wave.segment(tile.matrix);
  if (!found) return;
  const Segment s = *found;
  u32 unit = (blockIdx.x * 4 + warp()) * HALVES, column = unit / 2, half = unit % 2;
  if (column >= s.n / 16) return;
  u32 z = wave.rotation(found);
  // Rows beyond the tile's are read and not stored.
  const float* x = wave.rotated + ((u64)z * rows.count + tile.first - rows.first) * wave.k;
  const u32* trellis = (const u32*)wave.segments.line(s.data);
  float sum[R][HALVES];
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) sum[r][h] = 0.0f;
  }
  if (s.codebook == MUL1) at_rate<MUL1>(s, trellis, column, half, x, wave.k, sum);
  else if (s.codebook == MCG) at_rate<MCG>(s, trellis, column, half, x, wave.k, sum);
  else at_rate<THREE_INST>(s, trellis, column, half, x, wave.k, sum);
  float* raw = wave.raw + ((u64)blockIdx.z * rows.count + tile.first - rows.first) * wave.n;
#pragma unroll
  for (u32 r = 0; r < R; r++) {
#pragma unroll
    for (u32 h = 0; h < HALVES; h++) {
      // The four lanes that share a column.
      float v = sum[r][h] + __shfl_xor_sync(ALL, sum[r][h], 1);
      v = v + __shfl_xor_sync(ALL, v, 2);
      u32 at = 16 * column + 8 * (half + h) + lane() / 4;
      if (r < tile.count && lane() % 4 == 0) raw[r * (u64)wave.n + at] = v;
    }
  }
}

// Rotated rows have room for 7 more at the end of the scratch, so that a short tile may read a full one's.
KERNEL THREADS(128) exl3_product_1(Rows rows, Wave wave) { product<1, 1>(rows, wave); }
KERNEL THREADS(128) exl3_product_8(Rows rows, Wave wave) { product<8, 2>(rows, wave); }

KERNEL THREADS(128) exl3_finish(Rows rows, Wave wave) {
  u32 at = blockIdx.x, block = blockIdx.y * 4 + warp();
  Tile tile = tile_of(rows, at, 1);
  const Segment* s = wave.segment(tile.matrix);
  if (tile.count == 0 || !s || block * 128 >= s->n) return;
  const float* raw = wave.raw + ((u64)blockIdx.z * rows.count + at) * wave.n + block * 128 + 4 * lane();
  const u16* svh = (const u16*)wave.segments.line(s->svh);
  float v[4];
#pragma unroll
  for (u32 j = 0; j < 4; j++) v[j] = raw[j];
  hadamard<4>(v, 0.08838834764831845f);
  float* out = rows.output(tile.first) + s->output;
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    u32 column = block * 128 + 4 * lane() + j;
    float value = v[j] * half_to_float(svh[column]);
    if (s->bias != NO_LINE) value = value + ((const float*)wave.segments.line(s->bias))[column];
    if (column >= s->skip && column - s->skip < s->outputs) {
      float* to = out + column - s->skip;
      *to = s->input > 0 ? *to + value : value;
    }
  }
}

// The bias of a whole product, after all segments. A thread an output.
KERNEL THREADS(128) exl3_bias(Rows rows, const float* bias, u32 n) {
  u32 column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= n) return;
  float* out = rows.output(rows.first + blockIdx.x) + column;
  *out = *out + bias[column];
}
