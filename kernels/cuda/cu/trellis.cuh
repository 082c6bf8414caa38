// What the products with EXL3 share: what a launch covers, and how states become numbers.

// What a launch covers: segments `part .. part + gridDim.z` of each matrix; scratch rows are `k` and `n` numbers wide.
struct Wave {
  Segments segments;
  u32 part, k, n;
  // Whether there is one matrix with one segment: then it comes with the launch, and no block waits for the table.
  u32 known;
  float *rotated, *raw;
  // At one row, sums on their way to another block: [segment][row][column].
  u64* handed;
  Segment only;

  DEVICE const Segment* segment(u32 matrix) const {
    const Segment* s = segments.of(matrix, part + blockIdx.z);
    return s && s->kind == SEGMENT_EXL3 ? s : nullptr;
  }
  // The block's segment of a matrix, and where its rotated rows are; whether there is any.
  DEVICE bool find(u32 matrix, Segment& s, u32& rotated_at) const {
    rotated_at = 0;
    if (known) {
      s = only;
      return true;
    }
    const Segment* found = segment(matrix);
    if (!found) return false;
    s = *found;
    rotated_at = rotation(found);
    return true;
  }
  // Where segment `part + z` of the block finds its rotated rows: neighbours with the same scales and inputs share them.
  DEVICE u32 rotation(const Segment* s) const {
    u32 z = blockIdx.z;
    while (z > 0) {
      const Segment* before = s - 1;
      if (before->kind != SEGMENT_EXL3 || before->suh != s->suh || before->input != s->input ||
          before->inputs != s->inputs || before->lead != s->lead) break;
      s = before;
      z--;
    }
    return z;
  }
};

enum Codebook : u32 { THREE_INST = 0, MCG = 1, MUL1 = 2 };

// The code values of two 16-bit states.
template <u32 CODE> DEVICE void values_of(u32 a, u32 b, float& x, float& y) {
  if (CODE == MUL1) {
    u32 sums = bytes_of(byte_sum(a * 0x83DCD12Du, 0x6400u), byte_sum(b * 0x83DCD12Du, 0x6400u), 0x5410);
    half_pair_fma(sums, 0x1EEE1EEEu, 0xC931C931u, x, y);
  } else {
    u32 p = CODE == MCG ? a * 0xCBAC1FEDu : a * 89226354u + 64248484u;
    u32 q = CODE == MCG ? b * 0xCBAC1FEDu : b * 89226354u + 64248484u;
    x = half_pair_sum((p & 0x8FFF8FFFu) ^ 0x3B603B60u);
    y = half_pair_sum((q & 0x8FFF8FFFu) ^ 0x3B603B60u);
  }
}

// Ring bit just behind position p, `halves` being twice the bits a weight.
DEVICE u32 end_bit(u32 halves, u32 p) { return halves / 2 * (p + 1) + (halves & 1) * ((p + 1) / 2); }

// Tiles of a chain.
#define CHAIN 64
// What chains are added to: the first keeps its bits, a negative zero too.
#define NO_CHAINS -0.0f
