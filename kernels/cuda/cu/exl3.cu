// Products with weights in EXL3: matrices put together of segments, each a trellis of 16 x 16 tiles with scales of its own.
//
// Three kernels a wave of segments (those whose results do not add to one another's):
// - `exl3_rotate`: H(x * suh), rounded to half, in the order in which a tile's lanes read it. A warp a block of 128 channels.
// - `exl3_product`: a warp takes the left or right half of a column of tiles. Each lane cuts the states of four ring
//   positions out of the words of a tile, hashes them to code values in registers, and adds their products to one sum a
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

template <u32 CODE, int R>
DEVICE void multiply(const Segment& s, const u32* trellis, u32 column, u32 half, const float* x, u64 x_stride, float (&sum)[R]) {
  u32 words = 4 * s.halves, ring = 32 * words, first = 8 * lane() + 4 * half;
  // A window of 64 bits begins where the first of the lane's four states begins.
  u32 start = (end_bit(s.halves, first) + ring - 16) % ring, shift = start % 32;
  u32 a = start / 32, b = (a + 1) % words, c = (a + 2) % words;
  u32 d1 = end_bit(s.halves, first + 1) - end_bit(s.halves, first);
  u32 d2 = end_bit(s.halves, first + 2) - end_bit(s.halves, first);
  u32 d3 = end_bit(s.halves, first + 3) - end_bit(s.halves, first);
  u64 step = (u64)(s.n / 16) * words;
  const u32* tile = trellis + (u64)column * words;
  x += lane() % 4 * 4;
#pragma unroll 4
  for (u32 kt = 0; kt < s.k / 16; kt++) {
    const u32* w = tile + kt * step;
    u32 wa = w[a], wb = w[b], wc = w[c];
    u32 high = funnel(wa, wb, shift), next = funnel(wb, wc, shift);
    float v[4] = {
        value_of<CODE>(high >> 16), value_of<CODE>(funnel(high, next, d1) >> 16),
        value_of<CODE>(funnel(high, next, d2) >> 16), value_of<CODE>(funnel(high, next, d3) >> 16)};
#pragma unroll
    for (int r = 0; r < R; r++) {
      Float4 four = *(const Float4*)(x + r * x_stride + kt * 16);
#pragma unroll
      for (int e = 0; e < 4; e++) sum[r] = fma_rn(v[e], four.v[e], sum[r]);
    }
  }
}

template <int R> DEVICE void product(const Rows& rows, const Wave& wave, const Tile& tile, const Segment& s) {
  u32 column = blockIdx.x * 2 + warp() / 2, half = warp() % 2;
  if (column >= s.n / 16) return;
  u32 z = wave.rotation(wave.segment(tile.matrix));
  // Rows beyond the tile's repeat its last one and are not stored.
  const float* x = wave.rotated + ((u64)z * rows.count + tile.first - rows.first) * wave.k;
  const u32* trellis = (const u32*)wave.segments.line(s.data);
  float sum[R];
#pragma unroll
  for (int r = 0; r < R; r++) sum[r] = 0.0f;
  if (s.codebook == MUL1) multiply<MUL1, R>(s, trellis, column, half, x, wave.k, sum);
  else if (s.codebook == MCG) multiply<MCG, R>(s, trellis, column, half, x, wave.k, sum);
  else multiply<THREE_INST, R>(s, trellis, column, half, x, wave.k, sum);
  float* raw = wave.raw + ((u64)blockIdx.z * rows.count + tile.first - rows.first) * wave.n;
#pragma unroll
  for (u32 r = 0; r < R; r++) {
    // The four lanes that share a column.
    float v = sum[r] + __shfl_xor_sync(ALL, sum[r], 1);
    v = v + __shfl_xor_sync(ALL, v, 2);
    if (r < tile.count && lane() % 4 == 0) raw[r * (u64)wave.n + 16 * column + 8 * half + lane() / 4] = v;
  }
}

// Rotated rows have room for 7 more at the end of the scratch, so that a short tile may read a full one's.
KERNEL THREADS(128) exl3_product(Rows rows, Wave wave) {
  Tile tile = tile_of(rows, blockIdx.y, 8);
  if (tile.count == 0) return;
  const Segment* found = wave.segment(tile.matrix);
  if (!found) return;
  Segment s = *found;
  if (tile.count == 1) product<1>(rows, wave, tile, s);
  else product<8>(rows, wave, tile, s);
}

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
