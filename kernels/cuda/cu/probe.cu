// What a GPU can do at most, for `plugfold bench roofline --device cuda`: each kernel does one thing and nothing beside it.

// A launch that does nothing.
KERNEL THREADS(32) probe_empty(u32 unused) {
  (void)unused;
}

// Multiply-adds of a warp, each on what the one before gave. `steps` is a multiple of 64.
KERNEL THREADS(32) probe_chain(u32 steps, float factor, float* out) {
  float v = (float)lane();
#pragma unroll 1
  for (u32 i = 0; i < steps; i += 64) {
#pragma unroll
    for (u32 j = 0; j < 64; j++) v = fma_rn(v, factor, 0.5f);
  }
  // Never true, which the compiler cannot know.
  if (v < 0.0f) *out = v;
}

// Divisions, correctly rounded, each by what the one before gave. `steps` is a multiple of 16.
KERNEL THREADS(32) probe_divisions(u32 steps, float factor, float* out) {
  float v = 1.5f;
#pragma unroll 1
  for (u32 i = 0; i < steps; i += 16) {
#pragma unroll
    for (u32 j = 0; j < 16; j++) v = div_rn(factor, v);
  }
  if (v < 0.0f) *out = v;
}

// A number a line of 128 bytes: which line comes next, `step` lines on and around the end.
KERNEL THREADS(256) probe_links(u32* links, u32 lines, u32 step) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < lines) links[i * 32] = (i + step) % lines;
}

// From line to line, each known when the one before has come: the time of a fetch from the cache that all blocks share.
KERNEL THREADS(32) probe_fetches(const u32* links, u32 steps, u32* out) {
  u32 at = 0;
#pragma unroll 1
  for (u32 i = 0; i < steps; i++) at = bits_of(load_past_first_cache((const float*)links + (u64)at * 32));
  if (at == 0xffffffffu) *out = at;
}

// Multiply-adds of all threads that do not wait for each other: 16 sums a thread, `steps` each.
KERNEL THREADS(256) probe_rate(u32 steps, float factor, float* out) {
  float sums[16];
#pragma unroll
  for (u32 j = 0; j < 16; j++) sums[j] = (float)(threadIdx.x + j);
#pragma unroll 1
  for (u32 i = 0; i < steps; i += 8) {
#pragma unroll
    for (u32 turn = 0; turn < 8; turn++) {
#pragma unroll
      for (u32 j = 0; j < 16; j++) sums[j] = fma_rn(sums[j], factor, 0.5f);
    }
  }
  float all = 0.0f;
#pragma unroll
  for (u32 j = 0; j < 16; j++) all = all + sums[j];
  if (all < 0.0f) *out = all;
}

// Reads memory, a stretch of `each` pieces of 16 bytes a block; `each` is a multiple of 8 * 256.
KERNEL THREADS(256) probe_read(const float* from, u32 each, float* out) {
  const Float4* mine = (const Float4*)from + (u64)blockIdx.x * each + threadIdx.x;
  float sum = 0.0f;
#pragma unroll 1
  for (u32 i = 0; i < each; i += 8 * 256) {
    Float4 v[8];
#pragma unroll
    for (u32 j = 0; j < 8; j++) v[j] = mine[i + j * 256];
#pragma unroll
    for (u32 j = 0; j < 8; j++) sum = sum + ((v[j].v[0] + v[j].v[1]) + (v[j].v[2] + v[j].v[3]));
  }
  if (sum == 1.0f) *out = sum;
}

// Words that look random, cut to the bits of `keep` and with those of `set`: operands without a copy from the host.
KERNEL THREADS(256) probe_fill(u32* to, u64 words, u32 seed, u32 keep, u32 set) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += stride) {
    u32 v = (u32)i * 2654435761u + (u32)(i >> 32) + seed;
    v = (v ^ v >> 16) * 0x7feb352du;
    v = (v ^ v >> 15) * 0x846ca68bu;
    to[i] = ((v ^ v >> 16) & keep) | set;
  }
}
