// `mlp.act` and `moe.act`: silu(min(gate, limit)) * clamp(up, -limit, limit). A thread an element.
// Bound: 8 bytes in and 4 out an element.

KERNEL THREADS(256) swiglu(const float* x, u32 x_stride, float limit, u32 width, float* out, u32 out_stride) {
  u32 i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= width) return;
  x += (u64)blockIdx.x * x_stride;
  float gate = x[i], up = x[width + i];
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  out[(u64)blockIdx.x * out_stride + i] = silu_of(gate) * up;
}
