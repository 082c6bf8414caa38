// `embed` and `mtp.in`: token ids to rows.
// Bound: the bytes of the table's row in, those of the output out.

// How a table's rows are stored.
enum TableKind : u32 { ROWS_F32 = 0, ROWS_BF16 = 1, ROWS_EXL3 = 2 };

struct Table {
  const u8* data;
  const float* signs;
  u32 kind, bits;
};

// The code value of a state, as in EXL3's `mul1`.
DEVICE float mul1_value(u32 state) { return half_fma(byte_sum(state * 0x83DCD12Du, 0x6400u), 0x1EEEu, 0xC931u); }

// Coded rows: one ring for each 256 channels, its stream running from the least significant bit of each unit up. A warp
// decodes a ring, eight consecutive channels a lane.
template <class F> DEVICE void decode_row(const Table& table, u64 row, u32 width, F write) {
  u32 groups = (width + 255) / 256, units = 1 + 16 * table.bits;
  const u16* rings = (const u16*)(table.data + row * 2 * groups * units);
  for (u32 group = warp(); group < groups; group += blockDim.x / 32) {
    const u16* ring = rings + group * units;
    float scale = half_to_float(ring[0]);
    float v[8];
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      u32 at = 8 * lane() + j, state = 0;
      // Sixteen bits: the channel's own symbol lowest, its predecessors' above.
#pragma unroll 1
      for (u32 back = 0; back * table.bits < 16; back++) {
        u32 symbol = 0, first = (at + 256 - back) % 256 * table.bits;
#pragma unroll 1
        for (u32 b = 0; b < table.bits; b++) symbol |= ((ring[1 + (first + b) / 16] >> ((first + b) % 16)) & 1u) << b;
        state |= symbol << (back * table.bits);
      }
      v[j] = mul1_value(state & 0xffffu) * scale;
    }
    hadamard<8>(v, 0.0625f);
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      u32 i = 256 * group + 8 * lane() + j;
      if (i < width) write(i, v[j] * table.signs[i]);
    }
  }
}

// The embedding of table row `row`, element by element.
template <class F> DEVICE void look_up(const Table& table, const Round* round, u32 row, u32 width, F write) {
  const float* stands_in = round->embeds ? (const float*)round->embeds[row] : nullptr;
  u64 at = (u64)round->tokens[row];
  if (stands_in) {
    moved(width, [=](u32 i) { return stands_in[i]; }, write);
  } else if (table.kind == ROWS_F32) {
    const float* data = (const float*)table.data + at * width;
    moved(width, [=](u32 i) { return data[i]; }, write);
  } else if (table.kind == ROWS_BF16) {
    const u16* data = (const u16*)table.data + at * width;
    moved(width, [=](u32 i) { return float_of((u32)data[i] << 16); }, write);
  } else {
    decode_row(table, at, width, write);
  }
}

// A block a row of the call.
KERNEL THREADS(256) embed(
    const Round* round, const u8* data, const float* signs, u32 kind, u32 bits, u32 first_row, u32 streams, u32 width,
    float* out, u32 out_stride) {
  out += (u64)blockIdx.x * out_stride;
  Table table = {data, signs, kind, bits};
  look_up(table, round, first_row + blockIdx.x, width, [=](u32 i, float v) {
    for (u32 n = 0; n < streams; n++) out[(u64)n * width + i] = v;
  });
}

// Left half: the normed embedding, or zeros at position 0 if asked. Right half: the normed hidden row. A block each.
KERNEL THREADS(256) mtp_in(
    const Round* round, const u8* data, const float* signs, u32 kind, u32 bits, u32 first_row, u32 zero_first, u32 width,
    const float* enorm, const float* hnorm, float eps, const float* hidden, u32 hidden_stride, float* out, u32 out_stride) {
  const bool right = blockIdx.y == 1;
  out += (u64)blockIdx.x * out_stride + (right ? width : 0);
  const float *x = hidden + (u64)blockIdx.x * hidden_stride, *weight = right ? hnorm : enorm;
  if (!right) {
    u32 row = first_row + blockIdx.x;
    if (zero_first && round->positions[row] == 0) {
      for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = 0.0f;
      return;
    }
    look_up({data, signs, kind, bits}, round, row, width, [=](u32 i, float v) { out[i] = v; });
    __syncthreads();
    x = out;
  }
  float r = rms_factor(block_squares(width, [=](u32 i) { return x[i]; }), width, eps);
  moved(width, [=](u32 i) { return x[i] * r * weight[i]; }, [=](u32 i, float v) { out[i] = v; });
}
