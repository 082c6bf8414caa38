// `final`: mean over the streams, added in stream order, then RMS norm. A block a row.
// Bound: 4 * N bytes in and 4 out an element.

DEVICE float stream_mean(const float* x, u32 streams, u32 d, u32 i) {
  float sum = x[i];
  for (u32 n = 1; n < streams; n++) sum = sum + x[(u64)n * d + i];
  return div_rn(sum, (float)streams);
}

KERNEL THREADS(256) final_norm(
    const float* x, u32 x_stride, const float* weight, float eps, u32 streams, u32 d, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  out += (u64)blockIdx.x * out_stride;
  float r = rms_factor(block_squares(d, [=](u32 i) { return stream_mean(x, streams, d, i); }), d, eps);
  for (u32 i = threadIdx.x; i < d; i += blockDim.x) out[i] = stream_mean(x, streams, d, i) * r * weight[i];
}

// `tap`: the mean alone.
KERNEL THREADS(256) tap(const float* x, u32 x_stride, u32 streams, u32 d, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  out += (u64)blockIdx.x * out_stride;
  for (u32 i = threadIdx.x; i < d; i += blockDim.x) out[i] = stream_mean(x, streams, d, i);
}
