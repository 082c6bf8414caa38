// The vision tower beside its products, norms and activations: `vision.rotate`, `vision.gather`, `vision.gelu`. Attention within a
// frame is in mla.cu.

// Each head of q and k normed and turned, v moved beside k: a warp a head of one of the three. The angles are a row of d / 2
// cosines and as many sines. Bound: the bytes of the rows.
KERNEL THREADS(128) vision_rotate(
    const float* qkv, u32 qkv_stride, const float* angles, u32 angles_stride, const float* q_norm, const float* k_norm, float eps,
    u32 heads, u32 d, float* q, u32 q_stride, float* kv, u32 kv_stride) {
  u32 unit = blockIdx.y * 4 + warp(), part = unit / heads, head = unit % heads, half = d / 2;
  if (part > 2) return;
  u64 row = blockIdx.x;
  const float *x = qkv + row * qkv_stride + unit * d, *turn = angles + row * angles_stride, *norm = part == 0 ? q_norm : k_norm;
  float* out = part == 0 ? q + row * q_stride + head * d : kv + row * kv_stride + (2 * head + part - 1) * d;
  if (part == 2) {
    for (u32 i = lane(); i < d; i += 32) out[i] = x[i];
    return;
  }
  float sum = 0.0f;
  for (u32 i = lane(); i < (d + 31) / 32 * 32; i += 32) {
    float v = i < d ? x[i] : 0.0f;
    sum = fma_rn(v, v, sum);
  }
  float r = rms_factor(tree(sum), d, eps);
  for (u32 i = lane(); i < half; i += 32) {
    float a = x[i] * r * norm[i], b = x[half + i] * r * norm[half + i], cosine = turn[i], sine = turn[half + i];
    out[i] = fma_rn(a, cosine, -(b * sine));
    out[half + i] = fma_rn(b, cosine, a * sine);
  }
}

// Merge blocks of so many rows become a row each, channel by channel the places. A thread an element.
KERNEL THREADS(256) vision_gather(const float* x, u32 x_stride, u32 width, u32 places, float* out, u32 out_stride) {
  u32 i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= width * places) return;
  u64 row = blockIdx.x;
  out[row * out_stride + i] = x[(row * places + i % places) * x_stride + i / places];
}

// The error function in double precision, term by term as the reference.
DEVICE double error_function(double x) {
  double c = x > 4.0 ? 4.0 : x;
  c = c < -4.0 ? -4.0 : c;
  double square = c * c, term = c, sum = c, n = 0.0;
#pragma unroll 1
  while (n < 64.0) {
    n = n + 1.0;
    term = term * (-square / n);
    sum = sum + term / (2.0 * n + 1.0);
  }
  double y = sum * 1.12837916709551257390;
  y = x >= 4.0 ? 1.0 : y;
  return x <= -4.0 ? -1.0 : y;
}

// The layer norm of a row, then its gelu. A block a row; every warp adds for itself, so that nobody waits. Bound: the rate of
// multiply-adds in double precision, 64 terms of a series an element.
KERNEL THREADS(256) vision_gelu(
    const float* x, u32 x_stride, const float* weight, const float* bias, float eps, u32 n, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  out += (u64)blockIdx.x * out_stride;
  float sum = 0.0f, square = 0.0f;
  // One stretch more than there are whole ones, as the reference adds them.
#pragma unroll 4
  for (u32 i = lane(); i < n / 32 * 32 + 32; i += 32) sum = sum + (i < n ? x[i] : 0.0f);
  float mean = div_rn(tree(sum), (float)n);
#pragma unroll 4
  for (u32 i = lane(); i < (n + 31) / 32 * 32; i += 32) {
    float v = i < n ? x[i] - mean : 0.0f;
    square = fma_rn(v, v, square);
  }
  float inverse = rms_factor(tree(square), n, eps);
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
    double v = fma_rn((x[i] - mean) * inverse, weight[i], bias[i]);
    out[i] = (float)(0.5 * v * (1.0 + error_function(v * 0.70710678118654752440)));
  }
}
