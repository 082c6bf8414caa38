// Routing: `moe.pick`, `moe.group`, `moe.combine`. The products are in panels.cu and exl3.cu.

// Experts of a lane that its registers hold: 12 times 32 are more than the published model's 288.
#define HELD_EXPERTS 12

// By a warp: k times the largest of the lanes' best, ties to the lower expert. Of its experts lane, lane + 32, .. that are left, a lane's
// `look(best, at)` gives the largest key and whose it is, counted by 32; `take` takes one away.
template <class L, class T> DEVICE void pick(u32 k, L look, T take, i32* ids, u32* picked) {
  u32 best, at;
  look(best, at);
  for (u32 slot = 0; slot < k; slot++) {
    u32 expert = 32 * at + lane(), top = __reduce_max_sync(ALL, best), e = __reduce_min_sync(ALL, best == top ? expert : ~0u);
    if (lane() == 0) {
      ids[slot] = (i32)e;
      picked[slot] = e;
    }
    // Only the lane whose expert it was has to look again.
    if (expert == e) {
      take(at);
      look(best, at);
    }
    __syncwarp();
  }
}

// Experts of a row by falling biased score, ties to the lower id, and their weights from the unbiased scores. A block a row
// makes the scores, its first warp picks. Bound: latency, of k steps that each find the largest of 32 lanes' best.
KERNEL THREADS(512) moe_pick(
    const float* logits, u32 logits_stride, const float* bias, u32 experts, u32 k, u32 groups, u32 kept, u32 normalized,
    float scale, i32* ids, u32 ids_stride, float* weights, u32 weights_stride) {
  SHARED_BYTES(shared);
  // Scores; what orders them, 0 where an expert is not to be had; and the groups' scores, in whose place the picks lie later.
  float *score = (float*)shared, *group = score + 2 * experts;
  u32 *key = (u32*)(score + experts), *picked = (u32*)group;
  const bool grouped = kept < groups;
  logits += (u64)blockIdx.x * logits_stride;
  ids += (u64)blockIdx.x * ids_stride;
  weights += (u64)blockIdx.x * weights_stride;
  for (u32 e = threadIdx.x; e < experts; e += blockDim.x) {
    score[e] = sigmoid_of(logits[e]);
    float biased = score[e] + bias[e];
    key[e] = grouped ? bits_of(biased) : ordered(biased) + 1;
  }
  __syncthreads();
  if (grouped) {
    // A group's score is the sum of its two largest; the groups that are kept by falling score, ties to the lower one.
    u32 size = experts / groups;
    for (u32 g = threadIdx.x; g < groups; g += blockDim.x) {
      float first = -infinity(), second = -infinity();
      for (u32 i = 0; i < size; i++) {
        float v = float_of(key[g * size + i]);
        if (v > first) {
          second = first;
          first = v;
        } else if (v > second) {
          second = v;
        }
      }
      group[g] = size > 1 ? first + second : first;
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) {
      u32 g = e / size, better = 0, mine = ordered(group[g]);
      for (u32 o = 0; o < groups; o++) {
        u32 other = ordered(group[o]);
        if (other > mine || (other == mine && o < g)) better++;
      }
      key[e] = better < kept ? ordered(float_of(key[e])) + 1 : 0;
    }
    __syncthreads();
  }
  if (warp() != 0) return;
  if (experts <= 32 * HELD_EXPERTS) {
    u32 held[HELD_EXPERTS];
#pragma unroll
    for (u32 j = 0; j < HELD_EXPERTS; j++) held[j] = lane() + 32 * j < experts ? key[lane() + 32 * j] : 0;
    auto look = [&](u32& best, u32& at) {
      // In pairs, so that few comparisons wait for each other; of equal ones the lower.
      u32 most[HELD_EXPERTS], which[HELD_EXPERTS];
#pragma unroll
      for (u32 j = 0; j < HELD_EXPERTS; j++) {
        most[j] = held[j];
        which[j] = j;
      }
#pragma unroll
      for (u32 step = 1; step < HELD_EXPERTS; step *= 2) {
#pragma unroll
        for (u32 j = 0; j + step < HELD_EXPERTS; j += 2 * step) {
          which[j] = most[j + step] > most[j] ? which[j + step] : which[j];
          most[j] = most[j + step] > most[j] ? most[j + step] : most[j];
        }
      }
      best = most[0];
      at = which[0];
    };
    pick(k, look, [&](u32 at) {
#pragma unroll
      for (u32 j = 0; j < HELD_EXPERTS; j++) held[j] = j == at ? 0 : held[j];
    }, ids, picked);
  } else {
    pick(k, [&](u32& best, u32& at) {
      best = 0;
      at = 0;
#pragma unroll 8
      for (u32 e = lane(); e < experts; e += 32) {
        u32 own = key[e];
        at = own > best ? e / 32 : at;
        best = own > best ? own : best;
      }
    }, [&](u32 at) { key[lane() + 32 * at] = 0; }, ids, picked);
  }
  __syncwarp();
  float total = 0.0f;
#pragma unroll 8
  for (u32 slot = 0; slot < k; slot++) total = total + score[picked[slot]];
  float divisor = normalized ? total + 1e-20f : 1.0f;
  for (u32 slot = lane(); slot < k; slot += 32) weights[slot] = div_rn(score[picked[slot]], divisor) * scale;
}

// Up to 32 pairs, for `moe_group`. Every warp holds them all, a lane each; a thread counts what lies before an expert.
DEVICE void few_pairs(
    const i32* ids, u32 ids_stride, u32 pairs, u32 k, u32 experts, i32* order, u32 order_stride, i32* starts, u32 starts_stride) {
  u32 l = lane(), mine = l < pairs ? (u32)ids[(u64)(l / k) * ids_stride + l % k] : experts;
  for (u32 base = warp() * 32; base <= experts; base += blockDim.x) {
    u32 e = base + l, before = 0;
#pragma unroll 8
    for (u32 p = 0; p < pairs; p++) before += __shfl_sync(ALL, mine, p) < e;
    if (e <= experts) starts[(u64)e * starts_stride] = (i32)before;
  }
  if (warp() != 0) return;
  u32 place = 0;
#pragma unroll 8
  for (u32 p = 0; p < pairs; p++) {
    u32 other = __shfl_sync(ALL, mine, p);
    place += other < mine || (other == mine && p < l);
  }
  if (l < pairs) order[(u64)place * order_stride] = (i32)l;
}

// Pairs by expert, then by pair, and where each expert's begin. One block of up to 32 warps; each warp counts and then
// places a stretch of the pairs, so that the order is the pairs' own. Bound: the bytes of the ids, twice. So few pairs that a
// warp can hold them are compared with one another, and with every expert: nothing is counted and nothing waits.
KERNEL THREADS(1024) moe_group(
    const i32* ids, u32 ids_stride, u32 rows, u32 k, u32 experts, i32* order, u32 order_stride, i32* starts, u32 starts_stride) {
  SHARED_BYTES(shared);
  if (rows * k <= 32) {
    few_pairs(ids, ids_stride, rows * k, k, experts, order, order_stride, starts, starts_stride);
    return;
  }
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
  float sum = 0.0f, last = shared[row * shared_stride + i];
  // Eight slots' numbers are under way at a time.
#pragma unroll 8
  for (u32 slot = 0; slot < k; slot++) {
    sum = fma_rn(weights[row * weights_stride + slot], y[(row * k + slot) * y_stride + i], sum);
  }
  out[row * out_stride + i] = sum + last;
}
