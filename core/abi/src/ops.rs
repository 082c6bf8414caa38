//! The operation table: names, operands, weights, caches, sizes. The table is open: plugins may define more.
//!
//! Written as `inputs -> outputs`. R rows of the call, O rows that want logits, D hidden size, N streams, P parts of a
//! sum over ranks (side by side in a row, in rank order), H heads of this rank, E experts, I their inner width on this
//! rank, k experts a token. Everything is f32 unless it says i32. Pairs: pair `p = r * k + slot`, `R * k` of them.
//! A weight of format `plain.f32` is a vector or small matrix in plane 0; matrices are `dense` weights in any format.
//!
//! | operation | inputs -> outputs | weights | caches | dims | params |
//! | --- | --- | --- | --- | --- | --- |
//! | `embed` | -> x `[R, N*D]` (token row in every stream; rows with an address in `round.embeds` take that instead) | embed | | N, D, V | |
//! | `hc.dots` | x -> dots `[R, (2+N)*N + 1]` (fn x, then the sum of squares of x) | hc.fn (dense) | | N, D | |
//! | `hc.finish` | dots, x -> h `[R, D]` (collapsed and normed), post `[R, N]`, comb `[R, N*N]` (row i: stream i into j) | hc.base, hc.scale, norm | | N, D, sinkhorn iterations | rms eps, hc eps |
//! | `hc.post` | x, parts `[R, P*D]`, post, comb -> x' `[R, N*D]` | | | N, D, P | |
//! | `dense` | rows `[R, k]` -> rows `[R, n]` | the matrix; optional bias (plain) | | n, k | |
//! | `norm` | rows `[R, k]` -> rows `[R, k]` (RMS) | norm | | k | eps |
//! | `kda.mix` | qkv `[R, 3*H*K]` before the convolution, f `[R, H*K]` before dt_bias, gate `[R, H*K]` before the logistic, b `[R, H]` before the logistic -> rows `[R, H*K]` (normed and gated) | kda.conv `[3*H*K, T]`, kda.dt_bias `[H*K]`, kda.a_log `[H]`, kda.o_norm `[K]` | kda.state, kda.conv, kda.replay | H, K, T, 1 if the gate has a lower bound | rms eps, lower bound |
//! | `kda.commit` | -> (state and conv of parity 1 - p from parity p and the first `keep` replay rows; sequences with keep = rows are left alone) | | kda.state, kda.conv, kda.replay | H, K, T | |
//! | `mla.write` | latent `[R, r]` -> (cache rows at the rows' positions: per head d key then v value channels) | mla.kv_b (dense `[H*(d+v), r]`) | mla.kv | H, d, v, r | |
//! | `mla.dense` | q `[R, H*d]` -> rows `[R, H*v]`, over all positions up to the row's own | | mla.kv | H, d, v, r | scale |
//! | `mla.sparse` | q, lists `[R, L]` i32 ascending, counts `[R, 1]` i32 -> rows `[R, H*v]` | | mla.kv | H, d, v, r, L | scale |
//! | `idx.write` | key `[R, dI]` before the layer norm, gate `[R, dI]` -> (token rows: normed key then gate; pool keys of pools that these rows complete) | idx.k_norm, idx.k_bias, idx.ape `[kp, dI]` | idx.token, idx.pool | dI, kp | eps |
//! | `idx.select` | q `[R, HI*dI]`, w `[R, HI]` as projected (the provider scales by HI^-1/2 and dI^-1/2) -> lists `[R, L]` i32 of visible key positions, ascending, -1 after; counts `[R, 1]` i32 | | idx.pool | HI, dI, kp, top-k tokens, L | |
//! | `moe.logits` | h `[R, D]` -> logits `[R, E]` | moe.router (dense) | | E, D | |
//! | `moe.pick` | logits -> ids `[R, k]` i32 by falling biased score (ties to the lower id), weights `[R, k]` | moe.bias `[E]` | | E, k, groups, groups kept, 1 if normalized | scale |
//! | `moe.group` | ids -> order `[R*k, 1]` i32 (pairs by expert, then by pair), starts `[E+1, 1]` i32 | | | E, k | |
//! | `moe.up` | h `[R, D]`, order, starts -> Z `[R*k, 2*I]` (gate then up), by pair | experts.gate_up (stack of E `[2*I, D]`) | | E, k, I, D | |
//! | `moe.act` | Z -> A `[R*k, I]` | | | I | clamp |
//! | `moe.down` | A, order, starts -> Y `[R*k, D]` | experts.down (stack of E `[D, I]`) | | E, k, I, D | |
//! | `moe.combine` | Y, weights, shared `[R, D]` -> partial `[R, D]` (slots in order, shared last) | | | k, D | |
//! | `mlp.act` | gate and up `[R, 2*I]` -> `[R, I]` (clamped SwiGLU) | | | I | clamp |
//! | `comm.sum` | partial `[R, D]` -> parts `[R, P*D]` | | | D, P | |
//! | `residual` | x `[R, D]`, parts `[R, P*D]` -> x + the parts in rank order | | | D, P | |
//! | `tap` | x -> mean over the streams `[R, D]` | | | N, D | |
//! | `final` | x -> normed mean over the streams `[R, D]` | norm | | N, D | eps |
//! | `rows.pick` | rows `[R, D]` -> rows `[O, D]`, those of `round.out_rows` | | | D | |
//! | `mtp.in` | hidden rows `[R, D]` -> `[R, 2*D]` (normed embedding of the row's token, zero at position 0 if asked; then the normed hidden row) | embed, mtp.enorm, mtp.hnorm | | D, V, 1 if position 0 is zeroed | eps |
//! | `head` | rows `[O, D]` -> logits `[O, n]` | head (dense) | | n, D | |
//! | `sample.candidates` | logits `[O, n]` -> values `[O, C]` falling, ids `[O, C]` i32 (ties to the lower id; -inf and -1 where n < C) | | | n, C, first id of this rank | |
//! | `vision.rotate` | qkv `[R, 3*H*d]`, angles `[R, d]` (cosines, then sines) -> q `[R, H*d]` and kv `[R, 2*H*d]` (per head the key, then the value), q and k normed and turned | q_norm `[d]`, k_norm `[d]` | | H, d | eps |
//! | `vision.attend` | q, kv -> rows `[R, H*d]`, each over all rows of its sequence (a frame) in the call | | | H, d | scale |
//! | `vision.gather` | rows `[R*P, W]` -> rows `[R, W*P]` (P rows become one, channel by channel) | | | W, P | |
//! | `vision.gelu` | rows `[R, n]` -> gelu of their layer norm | norm `[n]`, norm bias `[n]` | | n | eps |
//!
//! The last four are the vision tower's, beside `dense`, `norm`, `mlp.act` and `residual`: the engine runs them apart from programs,
//! so no pass, fusion or provider of a plugin meets them.
//!
//! KDA families, all `State` addressed, one record a slot (and parity where two): `kda.state` two buffers `[H, K, K]`
//! (element order is the provider's, the same in mix and commit); `kda.conv` two buffers `[T-1, 3*H*K]`, oldest row first;
//! `kda.replay` one buffer of `window_rows` records `[3*H*K raw qkv | H*K normed k | H*K v | H*K log decay or decay | H beta]`
//! (`CacheView::rows` = window rows; written in window phase only). Token families are `Linear`: `mla.kv` and `idx.token`
//! a row a position, `idx.pool` a row a pool.

/// Whether an operation is an exchange between ranks.
pub fn is_collective(op: &str) -> bool {
    op.starts_with("comm.")
}
