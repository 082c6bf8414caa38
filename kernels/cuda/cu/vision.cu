// The vision tower beside its products, norms and activations: `vision.rotate`, `vision.gather`, `vision.gelu`. Attention within a
// frame is in attend.cu.

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

// Coefficients of the error function, the highest power first: an operand of a multiply-add each, where numbers in the code would have to
// be moved to registers.
CONSTANT double ERF[] = {
  7.026226861432765e-06, -1.7289445011580293e-05, -7.941260789356685e-06, 2.1416654400338723e-05, 9.866430925671902e-05,
  -0.0002150567501367816, 0.00017101253006796316, -0.00031121621716605067, 0.0008774585466429334,
  -0.0015764230166591385, 0.002442362885627378, -0.003975676726311758, 0.006357245293991823, -0.009525574544516179,
  0.013593904442559217, -0.01864266799275625, 0.024511243535155647, -0.03090982112074804, 0.03751810721026222,
  -0.0440367681413017, 0.05028422565643184, -0.05628880702589564, 0.06233247151582362, -0.068971248013314,
  0.07711001373886768, -0.08832127858767061, 0.10605123859683672, -0.14141917262081194, 0.28284255032000466};

// The reference's error function, in place: polynomials in t = 2 (x / 5)^2 - 1.
template <u32 SIDE> DEVICE void error_functions(double (&x)[SIDE]) {
  const double end = 5.0;
  double c[SIDE], t[SIDE], p[SIDE];
#pragma unroll
  for (u32 j = 0; j < SIDE; j++) {
    c[j] = x[j] > end ? end : x[j];
    c[j] = c[j] < -end ? -end : c[j];
    t[j] = fma_double_rn(c[j] * c[j], 2.0 / (end * end), -1.0);
    p[j] = ERF[0];
  }
#pragma unroll
  for (u32 i = 1; i < sizeof ERF / sizeof ERF[0]; i++) {
#pragma unroll
    for (u32 j = 0; j < SIDE; j++) p[j] = fma_double_rn(p[j], t[j], ERF[i]);
  }
#pragma unroll
  for (u32 j = 0; j < SIDE; j++) {
    double y = p[j] * c[j];
    y = x[j] >= end ? 1.0 : y;
    x[j] = x[j] <= -end ? -1.0 : y;
  }
}

// Sum of a row, to all threads of a block. Its first warp adds; all fetch.
DEVICE float block_sum(const float* x, u32 n) {
  SHARED float stage[STAGE];
  SHARED float result;
  float sum = 0.0f;
  // One stretch more than there are whole ones, as the reference adds them.
  u32 padded = n / 32 * 32 + 32;
  for (u32 first = 0; first < padded; first += STAGE) {
    u32 count = low(STAGE, padded - first);
    moved(count, [&](u32 i) { return first + i < n ? x[first + i] : 0.0f; }, [&](u32 i, float v) { stage[i] = v; });
    __syncthreads();
    if (warp() == 0) {
#pragma unroll 16
      for (u32 i = lane(); i < count; i += 32) sum = sum + stage[i];
    }
    __syncthreads();
  }
  if (warp() == 0) {
    sum = tree(sum);
    if (lane() == 0) result = sum;
  }
  __syncthreads();
  return result;
}

// Gelu of SIDE normed elements of a row from `first` on, a block apart: chains of multiply-adds beside each other.
template <u32 SIDE>
DEVICE void gelus(const float* x, const float* weight, const float* bias, float mean, float inverse, u32 first, float* out) {
  double v[SIDE], e[SIDE];
#pragma unroll
  for (u32 j = 0; j < SIDE; j++) {
    u32 i = first + j * blockDim.x;
    v[j] = fma_rn((x[i] - mean) * inverse, weight[i], bias[i]);
    e[j] = v[j] * 0.70710678118654752440;
  }
  error_functions(e);
#pragma unroll
  for (u32 j = 0; j < SIDE; j++) out[first + j * blockDim.x] = (float)(0.5 * v[j] * (1.0 + e[j]));
}

// The layer norm of a row, then its gelu. A block a row. Bound: the bytes of the rows; at many rows 28 multiply-adds in double
// precision an element.
KERNEL THREADS(256) vision_gelu(
    const float* x, u32 x_stride, const float* weight, const float* bias, float eps, u32 n, float* out, u32 out_stride) {
  x += (u64)blockIdx.x * x_stride;
  out += (u64)blockIdx.x * out_stride;
  float mean = div_rn(block_sum(x, n), (float)n);
  float inverse = rms_factor(block_squares(n, [&](u32 i) { return x[i] - mean; }), n, eps);
  u32 i = threadIdx.x;
  for (; i + 3 * blockDim.x < n; i += 4 * blockDim.x) gelus<4>(x, weight, bias, mean, inverse, i, out);
  for (; i < n; i += blockDim.x) gelus<1>(x, weight, bias, mean, inverse, i, out);
}
