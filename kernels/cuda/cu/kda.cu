// Gated linear attention: `kda.mix` and `kda.commit`.
//
// - `kda_mix_K` for heads of K = 32, 64 or 128 channels: everything in one launch, a block a sequence and head. K threads
//   hold a value channel's column of the state each, in registers, and take the rows one after another. Four more warps,
//   a row each, prepare the next four rows meanwhile (convolution, norms of q and k, decay, beta) and give those before
//   their norm and gate; a single row they share, a channel a thread. Bound: the bytes of the state, once in and once
//   out; at many rows a chain of K multiply-adds a row.
// - `kda_replay_K`: the same from replay records.
// - Other widths: `kda_prepare`, `kda_recur_any` (the column in shared memory), `kda_gate`, `kda_slide`, `kda_replay_any`.
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

// ---- heads of 32, 64 or 128 channels ----

// Rows that go through the recurrence between two barriers, one a helping warp.
#define BATCH 4
#define HELPERS (BATCH * 32)

// What the recurrence eats of some rows. The outputs take the place of v.
template <u32 K> struct alignas(16) Batch {
  float q[BATCH][K], k[BATCH][K], v[BATCH][K], decay[BATCH][K];
  // The logistic of the gate.
  float gate[BATCH][K];
  float beta[BATCH];
};

// The decay of a row, and what its key then sees of a column.
template <u32 K> DEVICE float decayed(float (&m)[K], const float* decay, const float* k) {
  float seen = 0.0f;
#pragma unroll
  for (u32 d = 0; d < K; d += 4) {
    Float4 a = *(const Float4*)(decay + d), b = *(const Float4*)(k + d);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      m[d + j] = m[d + j] * a.v[j];
      seen = fma_rn(b.v[j], m[d + j], seen);
    }
  }
  return seen;
}

// Writes `k * e` to a column, and reads it: with OUT the output, with MORE the next row's decay and what its key sees, so
// that two chains run side by side.
template <u32 K, bool OUT, bool MORE>
DEVICE void written(float (&m)[K], const float* k, float e, const float* q, float& sum, const float* decay, const float* next_k, float& seen) {
  sum = seen = 0.0f;
#pragma unroll
  for (u32 d = 0; d < K; d += 4) {
    // Without outputs the compiler would load far ahead, into registers that are not there.
    if (!OUT && d % 16 == 0) keep_order();
    Float4 a = *(const Float4*)(k + d), b, c, f;
    if constexpr (OUT) b = *(const Float4*)(q + d);
    if constexpr (MORE) {
      c = *(const Float4*)(decay + d);
      f = *(const Float4*)(next_k + d);
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      m[d + j] = fma_rn(a.v[j], e, m[d + j]);
      if constexpr (OUT) sum = fma_rn(b.v[j], m[d + j], sum);
      if constexpr (MORE) {
        m[d + j] = m[d + j] * c.v[j];
        seen = fma_rn(f.v[j], m[d + j], seen);
      }
    }
  }
}

// `count` rows through the column of value channel c.
template <u32 K, bool OUT> DEVICE void recur_batch(float (&m)[K], Batch<K>& rows, u32 count, u32 c) {
  float seen = decayed<K>(m, rows.decay[0], rows.k[0]), sum;
#pragma unroll 1
  for (u32 i = 0; i + 1 < count; i++) {
    float e = rows.beta[i] * (rows.v[i][c] - seen);
    written<K, OUT, true>(m, rows.k[i], e, rows.q[i], sum, rows.decay[i + 1], rows.k[i + 1], seen);
    if (OUT) rows.v[i][c] = sum;
  }
  u32 i = count - 1;
  float e = rows.beta[i] * (rows.v[i][c] - seen);
  written<K, OUT, false>(m, rows.k[i], e, rows.q[i], sum, nullptr, nullptr, seen);
  if (OUT) rows.v[i][c] = sum;
}

// A block's sequence: its place in the caches, and its rows.
struct Where {
  u32 head, slot, parity, rows;
};

// The rows of a block's sequence, in batches. `load` puts row r into place `w` of a batch, by helping warp w; `unload`
// takes its output; `last` is done by the helpers once. In step b the helpers load batch b and unload batch b - 2, whose
// places they had, while batch b - 1 goes through the recurrence. The two parts are apart, so that the helpers have the
// registers that a column takes. `single` is all that the helpers do for one row, with OUT, and comes to three barriers.
template <u32 K, bool OUT, class L, class U, class F, class S>
DEVICE void recur(const Where& at, const Cache& states, L load, U unload, F last, S single) {
  SHARED Batch<K> s_batch[2];
  const u32 batches = (at.rows + BATCH - 1) / BATCH;
  if (threadIdx.x >= K) {
    if (OUT && at.rows == 1) {
      single(s_batch[0]);
      return;
    }
    const u32 w = warp() - K / 32;
#pragma unroll 1
    for (u32 b = 0; b <= batches + 1; b++) {
      Batch<K>& batch = s_batch[b % 2];
      if (b > 1 && (b - 2) * BATCH + w < at.rows) unload((b - 2) * BATCH + w, batch, w);
      __syncwarp();
      if (b * BATCH + w < at.rows) load(b * BATCH + w, batch, w);
      if (b == 1) last();
      if (b <= batches) block_barrier();
    }
    return;
  }
  // Value channel c of the head.
  const u32 c = threadIdx.x;
  const u64 mine = (u64)at.head * K * K + c / 32 * 32 * K + c % 32;
  const float* from = states.row(at.slot, at.parity, 0) + mine;
  float m[K];
#pragma unroll
  for (u32 d = 0; d < K; d++) m[d] = from[d * 32];
  if (OUT && at.rows == 1) block_barrier();
  block_barrier();
#pragma unroll 1
  for (u32 b = 0; b < batches; b++) {
    recur_batch<K, OUT>(m, s_batch[b % 2], low(BATCH, at.rows - b * BATCH), c);
    block_barrier();
  }
  float* to = states.row(at.slot, 1 - at.parity, 0) + mine;
#pragma unroll
  for (u32 d = 0; d < K; d++) to[d * 32] = m[d];
}

// Numbers of the window that a helping thread fetches at a time: all of them, with heads of 128 channels and four taps.
#define SLID 9

// The convolution's window after `count` rows, of a head of K channels, by the helping threads. Loads before stores, as the compiler must
// take a store for one of what is loaded next.
template <u32 K> DEVICE void slide(const Sizes& z, u32 head, const float* window, const float* rows, u64 stride, u32 count, float* next) {
  const u32 all = (z.taps - 1) * 3 * K;
  for (u32 base = threadIdx.x - K; base < all; base += SLID * HELPERS) {
    float v[SLID];
#pragma unroll
    for (u32 j = 0; j < SLID; j++) {
      u32 i = base + j * HELPERS, column = i % (3 * K) / K * z.channels() + head * K + i % K;
      v[j] = i < all ? raw_of(z, window, rows, stride, count + i / (3 * K), column) : 0.0f;
    }
#pragma unroll
    for (u32 j = 0; j < SLID; j++) {
      u32 i = base + j * HELPERS, column = i % (3 * K) / K * z.channels() + head * K + i % K;
      if (i < all) next[(u64)(i / (3 * K)) * 3 * z.channels() + column] = v[j];
    }
  }
}

// Operands of `kda.mix`.
struct Mix {
  const Round* round;
  const float *qkv, *f, *gate, *b, *conv, *dt_bias, *a_log, *o_norm;
  float* out;
  u32 qkv_stride, f_stride, gate_stride, b_stride, out_stride;
  u32 first_seq, first_row, bounded, record;
  float bound, eps;
  Sizes z;
};

// Taps of the published model's convolution.
#define TAPS 4

// Convolution and silu of channels `first`, `first` + 32, .. of q, k and v, which are a head's, and what of the row and those before it was
// read for that. With as many taps as are known here, all loads are under way at once.
template <u32 EACH>
DEVICE void convolved(const Mix& o, const float* window, const float* rows, u32 row, u32 first, float (&v)[3][EACH], float (&x)[3][EACH][TAPS]) {
  const bool known = o.z.taps == TAPS && (u64)o.conv % 16 == 0;
  float weight[3][EACH][TAPS];
#pragma unroll
  for (u32 g = 0; g < 3; g++) {
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      u32 column = g * o.z.channels() + first + 32 * e;
      v[g][e] = 0.0f;
      if (known) {
        Float4 four = *(const Float4*)(o.conv + (u64)column * TAPS);
#pragma unroll
        for (u32 j = 0; j < TAPS; j++) {
          weight[g][e][j] = four.v[j];
          x[g][e][j] = raw_of(o.z, window, rows, o.qkv_stride, row + j, column);
        }
      } else {
        for (u32 j = 0; j < o.z.taps; j++) {
          v[g][e] = fma_rn(o.conv[(u64)column * o.z.taps + j], raw_of(o.z, window, rows, o.qkv_stride, row + j, column), v[g][e]);
        }
        // The row itself, and with as many taps those before it.
#pragma unroll
        for (u32 j = 0; j < TAPS; j++) {
          if (j + 1 == TAPS || o.z.taps == TAPS) x[g][e][j] = raw_of(o.z, window, rows, o.qkv_stride, row + o.z.taps + j - TAPS, column);
        }
      }
    }
  }
#pragma unroll
  for (u32 g = 0; g < 3; g++) {
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      if (known) {
#pragma unroll
        for (u32 j = 0; j < TAPS; j++) v[g][e] = fma_rn(weight[g][e][j], x[g][e][j], v[g][e]);
      }
      v[g][e] = silu_of(v[g][e]);
    }
  }
}

// Sum of squares of a row of which lane l has elements l, l + 32, ..
template <u32 N> DEVICE float warp_squares(const float (&v)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (u32 e = 0; e < N; e++) sum = fma_rn(v[e], v[e], sum);
  return tree(sum);
}

// A number that the compiler knows.
template <u32 N> struct Count {
  enum : u32 { value = N };
};

// One over the length of a row of q or k.
DEVICE float inverse_length(float squares) { return div_rn(1.0f, sqrt_rn(squares + 1e-6f)); }

// The decay of a channel, `f` being what its gate is made of.
DEVICE float decay_of(const Mix& o, float rate, float f) {
  return o.bounded ? exp_of(o.bound * sigmoid_of(rate * f)) : exp_of(-rate * softplus_of(f));
}

template <u32 K> DEVICE void mix(const Mix& o, const Cache& states, const Cache& windows, const Cache& replay) {
  const u32 each = K / 32, seq = o.first_seq + blockIdx.x, channels = o.z.channels();
  const Where at = {blockIdx.y, o.round->seq_slot[seq], o.round->seq_parity[seq], o.round->seq_rows[seq]};
  // The sequence's first row in the call's operands.
  const u64 start = o.round->seq_first[seq] - o.first_row;
  const float *rows = o.qkv + start * o.qkv_stride, *window = windows.row(at.slot, at.parity, 0);
  const u32 head = at.head;

  // `count` channels `first`, `first` + 32, .. of a row, to place w of a batch. `lengths` gives what q and k are to be multiplied with;
  // `ready` is called when the batch has them, and before what later calls need is stored.
  auto prepare = [&](auto count, u32 row, Batch<K>& to, u32 w, u32 first, auto lengths, auto ready) {
    constexpr u32 EACH = decltype(count)::value;
    float v[3][EACH], x[3][EACH][TAPS], decay[EACH], gate[EACH], q_inverse, k_inverse;
    const u32 column = head * K + first;
    const float *f_row = o.f + (start + row) * o.f_stride + column, *gate_row = o.gate + (start + row) * o.gate_stride + column;
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      decay[e] = f_row[32 * e] + o.dt_bias[column + 32 * e];
      gate[e] = gate_row[32 * e];
    }
    const float rate = exp_of(o.a_log[head]), beta = sigmoid_of(o.b[(start + row) * o.b_stride + head]);
    convolved<EACH>(o, window, rows, row, column, v, x);
    const float root = div_rn(1.0f, sqrt_rn((float)K));
    // A channel a thread: before the others are waited for. Several: afterwards, which takes fewer registers.
    auto gates = [&](u32 e) {
      decay[e] = decay_of(o, rate, decay[e]);
      gate[e] = sigmoid_of(gate[e]);
    };
    if constexpr (EACH == 1) gates(0);
    lengths(v, q_inverse, k_inverse);
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      const u32 c = first + 32 * e;
      if constexpr (EACH > 1) gates(e);
      v[1][e] = v[1][e] * k_inverse;
      to.q[w][c] = v[0][e] * q_inverse * root;
      to.k[w][c] = v[1][e];
      to.v[w][c] = v[2][e];
      to.decay[w][c] = decay[e];
      to.gate[w][c] = gate[e];
    }
    if (first == 0) to.beta[w] = beta;
    ready();
    if (o.record) {
      float* kept = replay.row(at.slot, 0, row) + column;
#pragma unroll
      for (u32 e = 0; e < EACH; e++) {
#pragma unroll
        for (u32 g = 0; g < 3; g++) kept[g * channels + 32 * e] = x[g][e][TAPS - 1];
        kept[3 * channels + 32 * e] = v[1][e];
        kept[4 * channels + 32 * e] = v[2][e];
        kept[5 * channels + 32 * e] = decay[e];
      }
      if (first == 0) kept[6 * channels + head - column] = beta;
    }
    // The window of a sequence of one row: what its convolution has read, but for the first.
    if (EACH == 1 && at.rows == 1 && o.z.taps == TAPS) {
      float* next = windows.row(at.slot, 1 - at.parity, 0) + column;
#pragma unroll
      for (u32 j = 1; j < TAPS; j++) {
#pragma unroll
        for (u32 g = 0; g < 3; g++) next[((j - 1) * 3 + g) * channels] = x[g][0][j];
      }
    }
  };
  auto load = [&](u32 row, Batch<K>& to, u32 w) {
    prepare(Count<each>(), row, to, w, lane(), [](const float (&v)[3][each], float& q, float& k) {
      q = inverse_length(warp_squares(v[0]));
      k = inverse_length(warp_squares(v[1]));
    }, [] {});
  };
  // A lane's outputs of a row, and the factor of their norm.
  auto factor = [&](const Batch<K>& from, u32 w, float (&core)[each]) {
#pragma unroll
    for (u32 e = 0; e < each; e++) core[e] = from.v[w][32 * e + lane()];
    return rms_factor(warp_squares(core), K, o.eps);
  };
  // Output norm and gate.
  auto unload = [&](u32 row, const Batch<K>& from, u32 w) {
    float core[each], r = factor(from, w, core);
    float* out = o.out + (start + row) * o.out_stride + head * K;
#pragma unroll
    for (u32 e = 0; e < each; e++) {
      u32 c = 32 * e + lane();
      out[c] = core[e] * r * o.o_norm[c] * from.gate[w][c];
    }
  };
  auto last = [&] { slide<K>(o.z, head, window, rows, o.qkv_stride, at.rows, windows.row(at.slot, 1 - at.parity, 0)); };
  auto single = [&](Batch<K>& batch) {
    const u32 c = threadIdx.x - K;
    // Lanes that went different ways meet first.
    auto ready = [] {
      __syncwarp();
      block_barrier();
    };
    if (c < K) {
      prepare(Count<1>(), 0, batch, 0, c, [&](const float (&v)[3][1], float& q, float& k) {
        // Through the place of a row that there is not; every warp adds all channels.
        batch.q[1][c] = v[0][0];
        batch.k[1][c] = v[1][0];
        ready();
        float all[2][each];
#pragma unroll
        for (u32 e = 0; e < each; e++) {
          all[0][e] = batch.q[1][32 * e + lane()];
          all[1][e] = batch.k[1][32 * e + lane()];
        }
        q = inverse_length(warp_squares(all[0]));
        k = inverse_length(warp_squares(all[1]));
      }, ready);
    } else {
      ready();
      ready();
    }
    if (o.z.taps != TAPS) last();
    float norm = c < K ? o.o_norm[c] : 0.0f;
    block_barrier();
    float core[each];
    if (c < K) o.out[start * o.out_stride + head * K + c] = batch.v[0][c] * factor(batch, 0, core) * norm * batch.gate[0][c];
  };
  recur<K, true>(at, states, load, unload, last, single);
}

// From replay records, for sequences that keep fewer rows than the forward had.
template <u32 K> DEVICE void replayed(const Round* round, u32 first_seq, const Sizes& z, const Cache& states, const Cache& windows, const Cache& replay) {
  u32 seq = first_seq + blockIdx.x, channels = z.channels(), keep = round->seq_keep[seq];
  if (keep == round->seq_rows[seq]) return;
  const Where at = {blockIdx.y, round->seq_slot[seq], round->seq_parity[seq], keep};
  const float *records = replay.row(at.slot, 0, 0), *window = windows.row(at.slot, at.parity, 0);
  const u64 stride = replay.row_bytes / 4;
  auto load = [&](u32 row, Batch<K>& to, u32 w) {
    const float* record = records + row * stride;
#pragma unroll
    for (u32 e = 0; e < K / 32; e++) {
      u32 c = 32 * e + lane(), column = at.head * K + c;
      to.k[w][c] = record[3 * channels + column];
      to.v[w][c] = record[4 * channels + column];
      to.decay[w][c] = record[5 * channels + column];
    }
    if (lane() == 0) to.beta[w] = record[6 * channels + at.head];
  };
  auto last = [&] { slide<K>(z, at.head, window, records, stride, keep, windows.row(at.slot, 1 - at.parity, 0)); };
  recur<K, false>(at, states, load, [](u32, const Batch<K>&, u32) {}, last, [](Batch<K>&) {});
}

KERNEL THREADS(160) kda_mix_32(Mix o, Cache states, Cache windows, Cache replay) { mix<32>(o, states, windows, replay); }
KERNEL THREADS(192) kda_mix_64(Mix o, Cache states, Cache windows, Cache replay) { mix<64>(o, states, windows, replay); }
KERNEL THREADS(256) kda_mix_128(Mix o, Cache states, Cache windows, Cache replay) { mix<128>(o, states, windows, replay); }
KERNEL THREADS(160) kda_replay_32(const Round* round, u32 first_seq, Sizes z, Cache states, Cache windows, Cache replay) {
  replayed<32>(round, first_seq, z, states, windows, replay);
}
KERNEL THREADS(192) kda_replay_64(const Round* round, u32 first_seq, Sizes z, Cache states, Cache windows, Cache replay) {
  replayed<64>(round, first_seq, z, states, windows, replay);
}
KERNEL THREADS(256) kda_replay_128(const Round* round, u32 first_seq, Sizes z, Cache states, Cache windows, Cache replay) {
  replayed<128>(round, first_seq, z, states, windows, replay);
}

// ---- other widths ----

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

// One warp: value channels 32 z .. of head y, a column a lane.
DEVICE void recur_any(const Stream& s, u32 width, const float* state, float* next, float* out, u64 out_stride) {
  // [key channel][32]: a lane touches its own column only.
  SHARED_BYTES(shared);
  float* m = (float*)shared + lane();
  u32 c = blockIdx.z * 32 + lane(), left = width - blockIdx.z * 32, block_width = low(32, left);
  u64 mine = (u64)blockIdx.y * width * width + (u64)blockIdx.z * 32 * width + lane();
  if (lane() >= left) return;
  const float* from = state + mine;
  float* to = next + mine;
  for (u32 d = 0; d < width; d++) m[d * 32] = from[(u64)d * block_width];
  for (u32 i = 0; i < s.rows; i++) {
    u64 row = i * s.stride;
    float beta = s.beta[row], v = s.v[row + c], seen = 0.0f, sum = 0.0f;
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
    if (s.q) out[i * out_stride + c] = sum;
  }
  for (u32 d = 0; d < width; d++) to[(u64)d * block_width] = m[d * 32];
}

// Sequence `first_seq + block x`; cores to `core [R, H*K]`.
KERNEL THREADS(32) kda_recur_any(
    const Round* round, u32 first_seq, u32 first_row, Sizes z, const float* prepared, Cache states, float* core) {
  u32 seq = first_seq + blockIdx.x, head = blockIdx.y, channels = z.channels();
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq];
  u64 row = round->seq_first[seq] - first_row;
  const float* p = prepared + row * prepared_len(z);
  const float* at = p + head * z.width;
  Stream s = {at, at + channels, at + 2 * channels, at + 3 * channels, p + 4 * channels + head, prepared_len(z), round->seq_rows[seq]};
  recur_any(s, z.width, states.row(slot, parity, 0), states.row(slot, 1 - parity, 0), core + row * channels + head * z.width, channels);
}

KERNEL THREADS(32) kda_replay_any(const Round* round, u32 first_seq, Sizes z, Cache states, Cache replay) {
  u32 seq = first_seq + blockIdx.x, head = blockIdx.y, channels = z.channels();
  u32 slot = round->seq_slot[seq], parity = round->seq_parity[seq], keep = round->seq_keep[seq];
  if (keep == round->seq_rows[seq]) return;
  const float* p = replay.row(slot, 0, 0);
  const float* at = p + 3 * channels + head * z.width;
  Stream s = {nullptr, at, at + channels, at + 2 * channels, p + 6 * channels + head, replay.row_bytes / 4, keep};
  recur_any(s, z.width, states.row(slot, parity, 0), states.row(slot, 1 - parity, 0), nullptr, 0);
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
