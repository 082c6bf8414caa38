// Routing: `moe.pick`, `moe.group`, `moe.combine`. The products are in panels.cu and exl3.cu.

// Experts of a row by falling biased score, ties to the lower id, and their weights from the unbiased scores. A warp a row.
// Bound: the bytes of the logits; k rounds over E / 32 numbers a lane.
KERNEL THREADS(32) moe_pick(
    const float* logits, u32 logits_stride, const float* bias, u32 experts, u32 k, u32 groups, u32 kept, u32 normalized,
    float scale, i32* ids, u32 ids_stride, float* weights, u32 weights_stride) {
  SHARED_BYTES(shared);
  float *score = (float*)shared, *biased = score + experts, *group = biased + experts;
  logits += (u64)blockIdx.x * logits_stride;
  ids += (u64)blockIdx.x * ids_stride;
  weights += (u64)blockIdx.x * weights_stride;
  for (u32 e = lane(); e < experts; e += 32) {
    score[e] = sigmoid_of(logits[e]);
    biased[e] = score[e] + bias[e];
  }
  __syncwarp();
  u32 size = experts / groups;
  if (kept < groups) {
    // A group's score is the sum of its two largest; the groups that are kept by falling score, ties to the lower one.
    for (u32 g = lane(); g < groups; g += 32) {
      float first = -infinity(), second = -infinity();
      for (u32 i = 0; i < size; i++) {
        float v = biased[g * size + i];
        if (v > first) {
          second = first;
          first = v;
        } else if (v > second) {
          second = v;
        }
      }
      group[g] = size > 1 ? first + second : first;
    }
    __syncwarp();
  }
  // What is left to choose from. A lane has experts lane, lane + 32, ...; a bit each says that it is gone.
  u32 gone[8];
#pragma unroll
  for (u32 i = 0; i < 8; i++) gone[i] = 0;
  if (kept < groups) {
    for (u32 e = lane(), i = 0; e < experts; e += 32, i++) {
      u32 g = e / size, better = 0, mine = ordered(group[g]);
      for (u32 o = 0; o < groups; o++) {
        u32 key = ordered(group[o]);
        if (key > mine || (key == mine && o < g)) better++;
      }
      if (better >= kept) {
#pragma unroll
        for (u32 word = 0; word < 8; word++) {
          if (i / 32 == word) gone[word] |= 1u << (i % 32);
        }
      }
    }
  }
  float total = 0.0f;
  for (u32 slot = 0; slot < k; slot++) {
    // Largest key first, lowest id among equals: one 64-bit number.
    u64 best = 0;
#pragma unroll
    for (u32 word = 0; word < 8; word++) {
#pragma unroll 1
      for (u32 bit = 0; bit < 32; bit++) {
        u32 e = (word * 32 + bit) * 32 + lane();
        if (e >= experts) break;
        if (gone[word] >> bit & 1) continue;
        u64 key = (u64)ordered(biased[e]) << 32 | (0xffffffffu - e);
        best = key > best ? key : best;
      }
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      u64 other = __shfl_xor_sync(ALL, best, mask);
      best = other > best ? other : best;
    }
    u32 e = 0xffffffffu - (u32)best;
    if (e % 32 == lane()) {
#pragma unroll
      for (u32 word = 0; word < 8; word++) {
        if (e / 1024 == word) gone[word] |= 1u << (e / 32 % 32);
      }
    }
    total = total + score[e];
    if (lane() == 0) ids[slot] = (i32)e;
  }
  __syncwarp();
  float divisor = normalized ? total + 1e-20f : 1.0f;
  for (u32 slot = lane(); slot < k; slot += 32) weights[slot] = div_rn(score[ids[slot]], divisor) * scale;
}

// Pairs by expert, then by pair, and where each expert's begin. One block of up to 32 warps; each warp counts and then
// places a stretch of the pairs, so that the order is the pairs' own. Bound: the bytes of the ids, twice.
KERNEL THREADS(1024) moe_group(
    const i32* ids, u32 ids_stride, u32 rows, u32 k, u32 experts, i32* order, u32 order_stride, i32* starts, u32 starts_stride) {
  SHARED_BYTES(shared);
  // [warp][expert]: how many pairs, then where the next one goes; and the experts' starts.
  u32 *at = (u32*)shared, warps = blockDim.x / 32, *first = at + warps * experts;
  for (u32 i = threadIdx.x; i < warps * experts; i += blockDim.x) at[i] = 0;
  __syncthreads();
  u32 pairs = rows * k, stretch = ((pairs + warps - 1) / warps + 31) / 32 * 32;
  u32 from = warp() * stretch, to = low(from + stretch, pairs);
  u32* mine = at + warp() * experts;
  for (u32 pass = 0; pass < 2; pass++) {
    for (u32 base = from; base < to; base += 32) {
      u32 pair = base + lane();
      bool there = pair < to;
      u32 e = there ? (u32)ids[(u64)(pair / k) * ids_stride + pair % k] : experts;
      u32 peers = __match_any_sync(ALL, e), before = __popc(peers & ((1u << lane()) - 1));
      u32 place = there ? mine[e] + before : 0;
      __syncwarp();
      if (there && before == 0) mine[e] += __popc(peers);
      if (there && pass == 1) order[(u64)place * order_stride] = (i32)pair;
      __syncwarp();
    }
    __syncthreads();
    if (pass == 1) return;
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) {
      u32 sum = 0;
      for (u32 w = 0; w < warps; w++) sum += at[w * experts + e];
      first[e] = sum;
    }
    __syncthreads();
    if (warp() == 0) {
      u32 carry = 0;
      for (u32 base = 0; base < experts; base += 32) {
        u32 e = base + lane(), own = e < experts ? first[e] : 0, sum = own;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
          u32 other = __shfl_up_sync(ALL, sum, step);
          if (lane() >= step) sum += other;
        }
        if (e < experts) {
          first[e] = carry + sum - own;
          starts[(u64)e * starts_stride] = (i32)(carry + sum - own);
        }
        carry += __shfl_sync(ALL, sum, 31);
      }
      if (lane() == 0) starts[(u64)experts * starts_stride] = (i32)carry;
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) {
      u32 next = first[e];
      for (u32 w = 0; w < warps; w++) {
        u32 own = at[w * experts + e];
        at[w * experts + e] = next;
        next += own;
      }
    }
    __syncthreads();
  }
}

// Weighted experts' rows in slot order, then the shared expert's. A thread a channel of a row.
// Bound: the bytes of k + 1 rows in and one out.
KERNEL THREADS(128) moe_combine(
    const float* y, u32 y_stride, const float* weights, u32 weights_stride, const float* shared, u32 shared_stride, u32 k, u32 d,
    float* out, u32 out_stride) {
  u32 i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= d) return;
  u64 row = blockIdx.x;
  float sum = 0.0f;
  for (u32 slot = 0; slot < k; slot++) {
    sum = fma_rn(weights[row * weights_stride + slot], y[(row * k + slot) * y_stride + i], sum);
  }
  out[row * out_stride + i] = sum + shared[row * shared_stride + i];
}
