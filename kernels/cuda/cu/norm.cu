// `norm`: RMS norm of rows: x / sqrt(mean(x^2) + eps), rounded, then times the weight.
// A block a row. Bound: 4 bytes in and 4 out an element.

KERNEL THREADS(256) rms_norm(const float* x, u32 x_stride, const float* weight, float eps, u32 k, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  out += (u64)blockIdx.x * out_stride;
  float r = rms_factor(block_squares(k, [=](u32 i) { return x[i]; }), k, eps);
  moved(k, [=](u32 i) { return x[i] * r * weight[i]; }, [=](u32 i, float v) { out[i] = v; });
}
