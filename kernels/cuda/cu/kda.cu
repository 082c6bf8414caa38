// Gated linear attention: `kda.mix` and `kda.commit`.
//
// - `kda_prepare`: convolution, norms of q and k, decay and beta of every row and head, to scratch. A block a row and head.
//   Bound: the bytes of the projections.
// - `kda_recur_K`: the recurrence, token by token. A thread holds one value channel's column of the state in registers.
//   Bound: the bytes of the state, once in and once out, at few rows; at many, two chains of K multiply-adds a row.
// - `kda_gate`: output norm and gate. A block a row and head.
// - `kda_slide`: the convolution's window after the rows.
//
// The state of a head is [block of 32 value channels][key channel][channel of the block], the last block narrower.

struct Sizes {
  u32 heads, width, taps;
  DEVICE u32 channels() const { return heads * width; }
};

// Scratch of a call: for each row [q | k | v | decay | beta], H*K each and H for beta, rounded up so that rows are aligned.
DEVICE u32 prepared_len(const Sizes& z) { return (4 * z.channels() + z.heads + 3) / 4 * 4; }

// Sum of squares of a row of `width` numbers in shared memory, by every warp alike.
DEVICE float squares(const float* row, u32 width) {
  float sum = 0.0f;
  for (u32 i = lane(); i < (width + 31) / 32 * 32; i += 32) {
    float v = i < width ? row[i] : 0.0f;
    sum = fma_rn(v, v, sum);
  }
  return tree(sum);
}

// Column `c` of row `at` of a sequence, counted from `history` rows before its first.
DEVICE float raw_of(const Sizes& z, const float* window, const float* qkv, u64 qkv_stride, u32 at, u32 c) {
  u32 history = z.taps - 1;
  return at < history ? window[(u64)at * 3 * z.channels() + c] : qkv[(u64)(at - history) * qkv_stride + c];
}

#define MAX_WIDTH 256

KERNEL THREADS(128) kda_prepare(
    const Round* round, u32 first_row, Sizes z, const float* qkv, u32 qkv_stride, const float* f, u32 f_stride,
    const float* b, u32 b_stride, const float* conv, const float* dt_bias, const float* a_log, u32 bounded, float bound,
    Cache windows, float* prepared, Cache replay, u32 record) {
  SHARED float s_row[3][MAX_WIDTH];
  u32 row = blockIdx.x, head = blockIdx.y, width = z.width, channels = z.channels();
  u32 seq = round->row_seq[first_row + row], start = round->seq_first[seq];
  u32 local = first_row + row - start;
  // The sequence's first row of the call, and its window.
  const float* rows = qkv + ((i64)start - (i64)first_row) * (i64)qkv_stride;
  const float* window = windows.row(round->seq_slot[seq], round->seq_parity[seq], 0);
  for (u32 i = threadIdx.x; i < 3 * width; i += blockDim.x) {
    u32 group = i / width, c = i % width, column = group * channels + head * width + c;
    float sum = 0.0f;
    for (u32 j = 0; j < z.taps; j++) {
      sum = fma_rn(conv[(u64)column * z.taps + j], raw_of(z, window, rows, qkv_stride, local + j, column), sum);
    }
    s_row[group][c] = silu_of(sum);
  }
  __syncthreads();
  float q_inverse = div_rn(1.0f, sqrt_rn(squares(s_row[0], width) + 1e-6f));
  float k_inverse = div_rn(1.0f, sqrt_rn(squares(s_row[1], width) + 1e-6f));
  float root = div_rn(1.0f, sqrt_rn((float)width)), rate = exp_of(a_log[head]);
  float beta = sigmoid_of(b[(u64)row * b_stride + head]);
  float* out = prepared + (u64)row * prepared_len(z) + head * width;
  float* kept = record ? replay.row(round->seq_slot[seq], 0, local) : nullptr;
  for (u32 c = threadIdx.x; c < width; c += blockDim.x) {
    float gate = f[(u64)row * f_stride + head * width + c] + dt_bias[head * width + c];
    float decay = bounded ? exp_of(bound * sigmoid_of(rate * gate)) : exp_of(-rate * softplus_of(gate));
    float q = s_row[0][c] * q_inverse * root, k = s_row[1][c] * k_inverse, v = s_row[2][c];
    out[c] = q;
    out[channels + c] = k;
    out[2 * channels + c] = v;
    out[3 * channels + c] = decay;
    if (kept) {
      u32 column = head * width + c;
#pragma unroll
      for (u32 group = 0; group < 3; group++) {
        kept[group * channels + column] = rows[(u64)local * qkv_stride + group * channels + column];
      }
      kept[3 * channels + column] = k;
      kept[4 * channels + column] = v;
      kept[5 * channels + column] = decay;
    }
  }
  if (threadIdx.x == 0) {
    prepared[(u64)row * prepared_len(z) + 4 * channels + head] = beta;
    if (kept) kept[6 * channels + head] = beta;
  }
}

// Rows that a recurrence eats, one sequence's: k, v, decay and beta of row i lie i * stride behind these, and q where
// outputs are wanted.
struct Stream {
  const float *q, *k, *v, *decay, *beta;
  u64 stride;
  u32 rows;
};

// Which column a thread has: value channel `c` of its head, `mine` the place of its first element in the state.
struct Column {
  u32 c, block_width;
  u64 mine;
  bool there;
};
DEVICE Column column_of(u32 width, u32 head) {
  u32 c = blockIdx.z * 32 + lane(), left = width - blockIdx.z * 32;
  return {c, low(32, left), (u64)head * width * width + (u64)blockIdx.z * 32 * width + lane(), lane() < left};
}

// One warp: 32 value channels of a head. K is the head's width where it is known, so that the column stays in registers;
// 0: any width, in shared memory.
template <u32 K> DEVICE void recur(const Stream& s, u32 width, const float* state, float* next, float* out, u64 out_stride) {
  Column at = column_of(width, blockIdx.y);
  const float* from = state + at.mine;
  float* to = next + at.mine;
  if constexpr (K > 0) {
    float m[K];
#pragma unroll
    for (u32 d = 0; d < K; d++) m[d] = from[d * 32];
    for (u32 i = 0; i < s.rows; i++) {
      u64 row = i * s.stride;
      const Float4 *k = (const Float4*)(s.k + row), *decay = (const Float4*)(s.decay + row);
      float beta = s.beta[row], v = s.v[row + at.c], seen = 0.0f, sum = 0.0f;
#pragma unroll
      for (u32 d = 0; d < K; d += 4) {
        Float4 a = decay[d / 4], b = k[d / 4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          m[d + j] = m[d + j] * a.v[j];
          seen = fma_rn(b.v[j], m[d + j], seen);
        }
      }
      float e = beta * (v - seen);
      if (s.q) {
        const Float4* q = (const Float4*)(s.q + row);
#pragma unroll
        for (u32 d = 0; d < K; d += 4) {
          Float4 a = q[d / 4], b = k[d / 4];
#pragma unroll
          for (u32 j = 0; j < 4; j++) {
            m[d + j] = fma_rn(b.v[j], e, m[d + j]);
            sum = fma_rn(a.v[j], m[d + j], sum);
          }
        }
        out[i * out_stride + at.c] = sum;
      } else {
#pragma unroll
        for (u32 d = 0; d < K; d += 4) {
          Float4 b = k[d / 4];
#pragma unroll
          for (u32 j = 0; j < 4; j++) m[d + j] = fma_rn(b.v[j], e, m[d + j]);
        }
      }
    }
#pragma unroll
    for (u32 d = 0; d < K; d++) to[d * 32] = m[d];
  } else {
    // [key channel][32]: a lane touches its own column only.
    SHARED_BYTES(shared);
    float* m = (float*)shared + lane();
    if (!at.there) return;
    for (u32 d = 0; d < width; d++) m[d * 32] = from[(u64)d * at.block_width];
    for (u32 i = 0; i < s.rows; i++) {
      u64 row = i * s.stride;
      float beta = s.beta[row], v = s.v[row + at.c], seen = 0.0f, sum = 0.0f;
      for (u32 d = 0; d < width; d++) {
        float v = m[d * 32] * s.decay[row + d];
        m[d * 32] = v;
        seen = fma_rn(s.k[row + d], v, seen);
      }
      float e = beta * (v - seen);
      for (u32 d = 0; d < width; d++) {
        float v = fma_rn(s.k[row + d], e, m[d * 32]);
        m[d * 32] = v;
        if (s.q) sum = fma_rn(s.q[row + d], v, sum);
      }
      if (s.q) out[i * out_stride + at.c] = sum;
    }
    for (u32 d = 0; d < width; d++) to[(u64)d * at.block_width] = m[d * 32];
  }
}

// Sequence `first_seq + block x`, head y, value channels 32 z ..; cores to `core [R, H*K]`.
template <u32 K>
DEVICE void recur_rows(const Round* round, u32 first_seq, u32 first_row, Sizes z, const float* prepared, Cache states, float* core) {
  u32 seq = first_seq + blockIdx.x, head = blockIdx.y, channels = z.channels();
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq];
  u64 row = round->seq_first[seq] - first_row;
  const float* p = prepared + row * prepared_len(z);
  const float* at = p + head * z.width;
  Stream s = {at, at + channels, at + 2 * channels, at + 3 * channels, p + 4 * channels + head, prepared_len(z), round->seq_rows[seq]};
  recur<K>(s, z.width, states.row(slot, parity, 0), states.row(slot, 1 - parity, 0), core + row * channels + head * z.width, channels);
}

// The same from replay records, for sequences that keep fewer rows than the forward had.
template <u32 K> DEVICE void recur_kept(const Round* round, u32 first_seq, Sizes z, Cache states, Cache replay) {
  u32 seq = first_seq + blockIdx.x, head = blockIdx.y, channels = z.channels();
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq], keep = round->seq_keep[seq];
  if (keep == round->seq_rows[seq]) return;
  const float* p = replay.row(slot, 0, 0);
  const float* at = p + 3 * channels + head * z.width;
  Stream s = {nullptr, at, at + channels, at + 2 * channels, p + 6 * channels + head, replay.row_bytes / 4, keep};
  recur<K>(s, z.width, states.row(slot, parity, 0), states.row(slot, 1 - parity, 0), nullptr, 0);
}

KERNEL THREADS(32) kda_recur_32(
    const Round* round, u32 first_seq, u32 first_row, Sizes z, const float* prepared, Cache states, float* core) {
  recur_rows<32>(round, first_seq, first_row, z, prepared, states, core);
}
KERNEL THREADS(32) kda_replay_32(const Round* round, u32 first_seq, Sizes z, Cache states, Cache replay) {
  recur_kept<32>(round, first_seq, z, states, replay);
}
KERNEL THREADS(32) kda_recur_64(
    const Round* round, u32 first_seq, u32 first_row, Sizes z, const float* prepared, Cache states, float* core) {
  recur_rows<64>(round, first_seq, first_row, z, prepared, states, core);
}
KERNEL THREADS(32) kda_replay_64(const Round* round, u32 first_seq, Sizes z, Cache states, Cache replay) {
  recur_kept<64>(round, first_seq, z, states, replay);
}
KERNEL THREADS(32) kda_recur_128(
    const Round* round, u32 first_seq, u32 first_row, Sizes z, const float* prepared, Cache states, float* core) {
  recur_rows<128>(round, first_seq, first_row, z, prepared, states, core);
}
KERNEL THREADS(32) kda_replay_128(const Round* round, u32 first_seq, Sizes z, Cache states, Cache replay) {
  recur_kept<128>(round, first_seq, z, states, replay);
}
KERNEL THREADS(32) kda_recur_any(
    const Round* round, u32 first_seq, u32 first_row, Sizes z, const float* prepared, Cache states, float* core) {
  recur_rows<0>(round, first_seq, first_row, z, prepared, states, core);
}
KERNEL THREADS(32) kda_replay_any(const Round* round, u32 first_seq, Sizes z, Cache states, Cache replay) {
  recur_kept<0>(round, first_seq, z, states, replay);
}

KERNEL THREADS(128) kda_gate(
    Sizes z, const float* core, const float* weight, float eps, const float* gate, u32 gate_stride, float* out, u32 out_stride) {
  SHARED float s_row[MAX_WIDTH];
  u64 row = blockIdx.x;
  u32 at = blockIdx.y * z.width;
  for (u32 c = threadIdx.x; c < z.width; c += blockDim.x) s_row[c] = core[row * z.channels() + at + c];
  __syncthreads();
  float r = rms_factor(squares(s_row, z.width), z.width, eps);
  for (u32 c = threadIdx.x; c < z.width; c += blockDim.x) {
    out[row * out_stride + at + c] = s_row[c] * r * weight[c] * sigmoid_of(gate[row * gate_stride + at + c]);
  }
}

// The last rows of the window followed by the sequence's rows, to the buffer that is not committed. With `kept` the rows
// are those of the replay records that are kept. A thread a number of the window.
KERNEL THREADS(128) kda_slide(
    const Round* round, u32 first_seq, u32 first_row, Sizes z, const float* qkv, u32 qkv_stride, Cache windows, Cache replay, u32 kept) {
  u32 seq = first_seq + blockIdx.x, columns = 3 * z.channels(), i = blockIdx.y * blockDim.x + threadIdx.x;
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq], rows = round->seq_rows[seq];
  if (i >= (z.taps - 1) * columns) return;
  u64 stride = qkv_stride;
  const float* from = nullptr;
  if (kept) {
    if (round->seq_keep[seq] == rows) return;
    rows = round->seq_keep[seq];
    from = replay.row(slot, 0, 0);
    stride = replay.row_bytes / 4;
  } else {
    from = qkv + (u64)(round->seq_first[seq] - first_row) * qkv_stride;
  }
  windows.row(slot, 1 - parity, 0)[i] = raw_of(z, windows.row(slot, parity, 0), from, stride, rows + i / columns, i % columns);
}
