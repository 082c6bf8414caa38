// What every kernel of attention takes: `mla.cu` and `attend.cu`.

struct Attend {
  const float* q;
  u64 q_stride;
  float* out;
  u64 out_stride;
  // Positions that a row sees; null: all up to its own.
  const i32* lists;
  u64 lists_stride;
  const i32* counts;
  u64 counts_stride;
  u32 first_row, rows, d, v;
  float scale;
  // Most positions of a list.
  u32 longest;
  // Whether a row sees all rows of its sequence, also those after it; the cache is the rows of the call then.
  u32 whole, unused;
};
