// Which rows meet which matrix: shared by the products with panels and with EXL3.

// Rows of a product.
//
// Without lists, row i of the input gives row i of the output. With the lists of `moe.group`, output row p (a pair) comes
// from input row p / fan, and belongs to the matrix of the expert whose list it is in. With `to`, output row i is the cache's of the
// call's row i.
struct Rows {
  const float* x;
  u64 x_stride;
  float* out;
  u64 out_stride;
  Cached to;
  const i32 *order, *starts;
  u32 experts, fan;
  // Rows, or places in `order`: from `first` on, so many.
  u32 first, count;

  DEVICE const float* input(u32 i) const { return x + (order ? (u32)order[i] / fan : i) * x_stride; }
  DEVICE float* output(u32 i) const {
    if (to.round) return to.row(i);
    return out + (order ? (u32)order[i] : i) * out_stride;
  }
};

// A block's rows: `count` from `first` on, all of one matrix. None: the block has nothing to do.
struct Tile {
  u32 matrix, first, count;
};

// Starts of lists that a lane fetches at a time.
#define STARTS_AT_ONCE 12

// Rows of block `index` in tiles of `height`. With lists every place has a block, and the first of each tile of its expert
// takes the tile: so no expert's rows need to be known before the launch. All threads of a warp ask together.
DEVICE Tile tile_of(const Rows& rows, u32 index, u32 height) {
  u32 end = rows.first + rows.count;
  if (!rows.order) {
    u32 first = rows.first + index * height;
    return {0, first, first < end ? low(height, end - first) : 0};
  }
  u32 at = rows.first + index;
  if (at >= end) return {0, 0, 0};
  // The expert whose list holds this place: the last whose start is not beyond it. A warp looks at 384 together, all loads
  // before the first is waited for; there is one start more than there are experts.
  u32 begun = 0;
  for (u32 e = 0; e < rows.experts; e += 32 * STARTS_AT_ONCE) {
    u32 starts[STARTS_AT_ONCE];
#pragma unroll
    for (u32 j = 0; j < STARTS_AT_ONCE; j++) starts[j] = (u32)rows.starts[low(e + 32 * j + lane(), rows.experts)];
#pragma unroll
    for (u32 j = 0; j < STARTS_AT_ONCE; j++) {
      begun += __popc(__ballot_sync(ALL, e + 32 * j + lane() < rows.experts && starts[j] <= at));
    }
  }
  u32 a = begun - 1;
  u32 from = (u32)rows.starts[a], to = low((u32)rows.starts[a + 1], end);
  from = from > rows.first ? from : rows.first;
  if ((at - from) % height != 0) return {a, at, 0};
  return {a, at, low(height, to - at)};
}

// One segment of a weight put together of parts: the fields of `Segment`, in order.
struct Segment {
  u32 matrix, output, outputs, input, inputs, lead, skip, kind, k, n, halves, codebook, data, suh, svh, bias;
};
enum SegmentKind : u32 { SEGMENT_EXL3 = 0, SEGMENT_BF16 = 1, SEGMENT_F32 = 2 };
#define NO_LINE 0xffffffffu
#define LINE 64

// The table of segments of a weight, the place of each matrix's first segment (one more than there are matrices), and the data.
struct Segments {
  const Segment* table;
  const u32* first;
  const u8* data;
  // Segment `part` of a matrix, or null.
  DEVICE const Segment* of(u32 matrix, u32 part) const {
    u32 at = first[matrix] + part;
    return at < first[matrix + 1] ? table + at : nullptr;
  }
  DEVICE const u8* line(u32 index) const { return data + (u64)index * LINE; }
};
