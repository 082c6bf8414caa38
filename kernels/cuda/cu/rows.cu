// Operations that move or add rows: `residual`, `rows.pick`, `comm.sum` of one rank. A block a row.
// Bound: the bytes of the rows.

// The ranks' parts added in rank order, then x.
KERNEL THREADS(256) residual(
    const float* x, u32 x_stride, const float* parts, u32 parts_stride, u32 d, u32 count, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  parts += (u64)blockIdx.x * parts_stride;
  out += (u64)blockIdx.x * out_stride;
  auto added = [=](u32 i) {
    float sum = parts[i];
    for (u32 p = 1; p < count; p++) sum = sum + parts[(u64)p * d + i];
    return sum + x[i];
  };
  auto store = [=](u32 i, float v) { out[i] = v; };
  if (count == 1) moved(d, [=](u32 i) { return parts[i] + x[i]; }, store);
  else moved(d, added, store);
}

// Row `rows[block]` of the input, or row `block` where there is no list.
KERNEL THREADS(256) copy_rows(const float* x, u32 x_stride, const u32* rows, u32 d, float* out, u32 out_stride) {
  u32 row = rows ? rows[blockIdx.x] : blockIdx.x;
  x += (u64)row * x_stride;
  out += (u64)blockIdx.x * out_stride;
  moved(d, [=](u32 i) { return x[i]; }, [=](u32 i, float v) { out[i] = v; });
}
