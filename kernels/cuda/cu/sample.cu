// `sample.candidates`: the C largest logits of a row, falling, ties to the lower id; -inf and -1 where there are fewer.
//
// - `sample_slices`: a block takes 4096 logits and keeps the best C of them. Bound: the bytes of the logits.
// - `sample_merge`: a block a row chooses among what the slices kept, and sorts it.

#define SLICE 4096
#define SLICE_THREADS 512

// Kept values, `[row][slice][keep]`, and their places in the row; a slice that has fewer fills up with what is no number, which
// comes after every number (place ~0).
KERNEL THREADS(512) sample_slices(
    const float* logits, u32 logits_stride, u32 n, u32 keep, float* values, u32* places) {
  u32 first = blockIdx.y * SLICE, count = low(SLICE, n - first);
  const float* x = logits + (u64)blockIdx.x * logits_stride + first;
  u64 at = ((u64)blockIdx.x * gridDim.y + blockIdx.y) * keep;
  values += at;
  places += at;
  if (count <= keep) {
    for (u32 i = threadIdx.x; i < keep; i += blockDim.x) {
      values[i] = i < count ? x[i] : float_of(0x7fc00000u);
      places[i] = i < count ? first + i : ~0u;
    }
    return;
  }
  const Kept<SLICE / SLICE_THREADS> set(count, [=](u32 i) { return x[i]; });
  Threshold t = threshold_of(set, keep);
  place_best(set, t, [=](u32 place, u32 i) {
    values[place] = x[i];
    places[place] = first + i;
  });
}

// Candidates that are ranked, not sorted.
#define RANKED 128
// Values that a thread of `sample_merge` can hold.
#define MERGED 8

// `held` kept values a row. The best c of them (as many as there are, up to the `wanted`), sorted in shared memory by (falling key, rising place): `room` is c rounded
// up to a power of two, and at least eight.
KERNEL THREADS(1024) sample_merge(
    const float* logits, u32 logits_stride, const float* values, const u32* places, u32 held, u32 c, u32 room, u32 first_id,
    float* out, u32 out_stride, i32* ids, u32 ids_stride, u32 wanted) {
  SHARED_BYTES(shared);
  u64* keys = (u64*)shared;
  logits += (u64)blockIdx.x * logits_stride;
  values += (u64)blockIdx.x * held;
  places += (u64)blockIdx.x * held;
  for (u32 i = threadIdx.x; i < room; i += blockDim.x) keys[i] = ~0ull;
  __syncthreads();
  auto value = [=](u32 i) { return values[i]; };
  auto put = [=](u32 place, u32 i) { keys[place] = (u64)~ordered(values[i]) << 32 | places[i]; };
  if (held <= c) {
    for (u32 i = threadIdx.x; i < held; i += blockDim.x) put(i, i);
  } else if (held <= MERGED * blockDim.x) {
    const Kept<MERGED> set(held, value);
    place_best(set, threshold_of(set, c), put);
  } else {
    const auto set = fetched(held, value);
    place_best(set, threshold_of(set, c), put);
  }
  __syncthreads();
  auto give = [=](u32 i, u64 key, bool there) {
    u32 place = (u32)key;
    there = there && place != ~0u;
    out[(u64)blockIdx.x * out_stride + i] = there ? logits[place] : -infinity();
    ids[(u64)blockIdx.x * ids_stride + i] = there ? (i32)(first_id + place) : -1;
  };
  if (c <= RANKED) {
    // A few: each is compared with all others.
    for (u32 i = threadIdx.x; i < c; i += blockDim.x) {
      u64 mine = keys[i];
      u32 rank = 0;
      // Up to the whole room: what comes after the c-th is more than every key.
      for (u32 first = 0; first < room; first += 8) {
#pragma unroll
        for (u32 j = first; j < first + 8; j++) rank += keys[j] < mine || (keys[j] == mine && j < i);
      }
      give(rank, mine, true);
    }
    for (u32 i = c + threadIdx.x; i < wanted; i += blockDim.x) give(i, ~0ull, false);
    return;
  }
  for (u32 size = 2; size <= room; size *= 2) {
    for (u32 stride = size / 2; stride > 0; stride /= 2) {
      for (u32 i = threadIdx.x; i < room; i += blockDim.x) {
        u32 other = i ^ stride;
        if (other > i) {
          u64 a = keys[i], b = keys[other];
          if ((a > b) == ((i & size) == 0)) {
            keys[i] = b;
            keys[other] = a;
          }
        }
      }
      __syncthreads();
    }
  }
  for (u32 i = threadIdx.x; i < wanted; i += blockDim.x) give(i, i < c ? keys[i] : ~0ull, i < c);
}
