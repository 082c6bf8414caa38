// `final`: mean over the streams, added in stream order, then RMS norm. A block a row.
// Bound: 4 * N bytes in and 4 out an element.

// N is the number of streams where it is known when this is compiled: then those of several elements are fetched together.
template <u32 N> DEVICE float stream_mean(const float* x, u32 streams, u32 d, u32 i) {
  const u32 count = N > 0 ? N : streams;
  float sum = x[i];
#pragma unroll (N > 0 ? N : 1)
  for (u32 n = 1; n < count; n++) sum = sum + x[(u64)n * d + i];
  // Exact by a power of two: the product is the quotient, and no load waits behind the branches of a division.
  static_assert((N & (N - 1)) == 0, "a power of two");
  return N > 0 ? sum * (1.0f / (N > 0 ? N : 1)) : div_rn(sum, (float)count);
}
#define KNOWN_STREAMS 4

template <u32 N> DEVICE void mean_normed(const float* x, const float* weight, float eps, u32 streams, u32 d, float* out) {
  float r = rms_factor(block_squares(d, [=](u32 i) { return stream_mean<N>(x, streams, d, i); }), d, eps);
  moved(d, [=](u32 i) { return stream_mean<N>(x, streams, d, i) * r * weight[i]; }, [=](u32 i, float v) { out[i] = v; });
}

KERNEL THREADS(256) final_norm(
    const float* x, u32 x_stride, const float* weight, float eps, u32 streams, u32 d, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  out += (u64)blockIdx.x * out_stride;
  if (streams == KNOWN_STREAMS) mean_normed<KNOWN_STREAMS>(x, weight, eps, streams, d, out);
  else mean_normed<0>(x, weight, eps, streams, d, out);
}

// `tap`: the mean alone.
KERNEL THREADS(256) tap(const float* x, u32 x_stride, u32 streams, u32 d, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  out += (u64)blockIdx.x * out_stride;
  auto store = [=](u32 i, float v) { out[i] = v; };
  if (streams == KNOWN_STREAMS) moved(d, [=](u32 i) { return stream_mean<KNOWN_STREAMS>(x, streams, d, i); }, store);
  else moved(d, [=](u32 i) { return stream_mean<0>(x, streams, d, i); }, store);
}
