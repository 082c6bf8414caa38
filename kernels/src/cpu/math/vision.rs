//! The vision tower: patches of images to rows of the language model.
//!
//! Rows of one frame attend to each other, so a frame's bits depend on that frame only, not on the others of the call.

use super::act::swiglu;
use super::dense::{PackedMatrix, matmul};
use super::mla;
use super::norm::{layer, residual, rms};
use super::num::{dot_inline, gelu};
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::simd::kernel;

/// ε of the merger's layer norm; unlike that of the other norms it is not in the configuration.
pub const MERGER_EPS: f32 = 1e-5;

/// Sizes and constants of a tower.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// W.
    pub width: usize,
    /// Attention heads.
    pub heads: usize,
    /// Patches of a row of the language model, along one side.
    pub merge: usize,
    /// Of all RMS norms.
    pub eps: f32,
    /// Clamp of the SwiGLUs.
    pub clamp: f32,
    /// Base of the rotary frequencies.
    pub theta: f64,
}

/// A grid of patches: frames, rows, columns (the latter two multiples of the merge size).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Frames; 1 for an image.
    pub frames: usize,
    /// Patch rows.
    pub height: usize,
    /// Patch columns.
    pub width: usize,
}

impl Grid {
    /// Patches of one frame.
    pub const fn frame(&self) -> usize {
        self.height * self.width
    }
}

/// A matrix and its bias.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[out, in]`.
    pub weight: PackedMatrix<'a>,
    /// `[out]`.
    pub bias: Option<&'a [f32]>,
}

impl Linear<'_> {
    fn run(&self, x: &[f32]) -> Vec<f32> {
        let x = Rows::new(x, self.weight.k());
        let mut out = vec![0.0; x.rows() * self.weight.n()];
        matmul(x, self.weight, self.bias, RowsMut::new(&mut out, self.weight.n()));
        out
    }
}

/// Weights of one block.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// Before attention, `[W]`.
    pub norm1: &'a [f32],
    /// `[3*W, W]`: all q, then all k, then all v.
    pub qkv: Linear<'a>,
    /// Of every head of q.
    pub q_norm: &'a [f32],
    /// Of every head of k.
    pub k_norm: &'a [f32],
    /// `[W, W]`.
    pub proj: Linear<'a>,
    /// Before the feed-forward part, `[W]`.
    pub norm2: &'a [f32],
    /// `[2*I, W]`: gate rows, then up rows.
    pub gate_up: Linear<'a>,
    /// `[W, I]`.
    pub down: Linear<'a>,
}

/// Weights of a tower.
#[derive(Clone, Debug)]
pub struct Tower<'a> {
    /// Sizes.
    pub shape: Shape,
    /// `[W, patch]`, flattened channel, time, row, column.
    pub patch: Linear<'a>,
    /// The blocks.
    pub blocks: Vec<Block<'a>>,
    /// `[W]`.
    pub post_norm: &'a [f32],
    /// `[out, W * merge²]`: the published `[out, W, merge, merge]` flattened.
    pub downsample: Linear<'a>,
    /// `[out, out]`, no bias.
    pub merger: PackedMatrix<'a>,
    /// Layer norm weight of the merger, `[out]`.
    pub merger_norm: &'a [f32],
    /// Layer norm bias of the merger, `[out]`.
    pub merger_norm_bias: &'a [f32],
    /// `[2*P, out]`: gate rows, then up rows, no bias.
    pub merger_gate_up: PackedMatrix<'a>,
    /// `[out, P]`, no bias.
    pub merger_down: PackedMatrix<'a>,
}

/// Why patches cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VisionError {
    /// A side of a grid is not whole merge blocks.
    #[error("vision grid {index} is {height} x {width} patches; both must be multiples of {merge} and not 0")]
    Grid {
        /// Which grid.
        index: usize,
        /// Its rows.
        height: usize,
        /// Its columns.
        width: usize,
        /// Merge size.
        merge: usize,
    },
    /// Patches and grids do not agree.
    #[error(
        "the vision grids hold {grids} patches of {width} values, the pixels are {pixels} patches of {got}"
    )]
    Patches {
        /// Patches of the grids.
        grids: usize,
        /// Values of a patch by the weights.
        width: usize,
        /// Patches given.
        pixels: usize,
        /// Values of a patch given.
        got: usize,
    },
}

/// Cosines and then sines of the rotary angles of every patch of every grid, a row of `width` numbers each, `width` being that of
/// a head.
///
/// Patches are ordered by merge blocks: block row, block column, then row and column inside the block. Double precision from
/// the standard library, rounded once.
pub fn angles(grids: &[Grid], merge: usize, width: usize, theta: f64) -> Vec<f32> {
    let quarter = width / 4;
    let freq: Vec<f64> = (0..quarter).map(|i| theta.powf(-(2.0 * i as f64) / (width / 2) as f64)).collect();
    let mut all = Vec::new();
    for grid in grids {
        let across = grid.width / merge;
        let mut frame = Vec::with_capacity(grid.frame() * width);
        for patch in 0..grid.frame() {
            let (block, inner) = (patch / (merge * merge), patch % (merge * merge));
            let row = block / across * merge + inner / merge;
            let column = block % across * merge + inner % merge;
            let turns = [row, column].map(|at| freq.iter().map(move |f| at as f64 * f));
            let turns: Vec<f64> = turns.into_iter().flatten().collect();
            frame.extend(turns.iter().map(|angle| angle.cos() as f32));
            frame.extend(turns.iter().map(|angle| angle.sin() as f32));
        }
        (0..grid.frames).for_each(|_| all.extend_from_slice(&frame));
    }
    all
}

/// Refuses grids whose sides are not whole merge blocks, and patches that are not theirs.
///
/// # Errors
/// The first grid at fault, or how many patches there are.
pub fn check(grids: &[Grid], merge: usize, width: usize, pixels: Rows<'_>) -> Result<(), VisionError> {
    for (index, grid) in grids.iter().enumerate() {
        let whole = |side: usize| side > 0 && side.is_multiple_of(merge);
        if !whole(grid.height) || !whole(grid.width) {
            return Err(VisionError::Grid { index, height: grid.height, width: grid.width, merge });
        }
    }
    let patches: usize = grids.iter().map(|g| g.frames * g.frame()).sum();
    if patches != pixels.rows() || pixels.cols() != width {
        let (pixels, got) = (pixels.rows(), pixels.cols());
        return Err(VisionError::Patches { grids: patches, width, pixels, got });
    }
    Ok(())
}

kernel! {
    /// Norm and rotation of one head of one row, in place: pairs are (i, i + width / 2).
    fn rotate[][](head: &'a mut [f32], norm: &'a [f32], eps: f32, cos: &'a [f32], sin: &'a [f32]) -> () {
        let inverse = 1.0 / (dot_inline(head, head) / head.len() as f32 + eps).sqrt();
        for (h, w) in head.iter_mut().zip(norm) {
            *h = *h * inverse * w;
        }
        let (a, b) = head.split_at_mut(cos.len());
        for (((a, b), c), s) in a.iter_mut().zip(b.iter_mut()).zip(cos).zip(sin) {
            let (x, y) = (*a, *b);
            *a = x.mul_add(*c, -(y * s));
            *b = y.mul_add(*c, x * s);
        }
    }
}

kernel! {
    fn gelu_in_place[][](x: &'a mut [f32]) -> () {
        for v in x.iter_mut() {
            *v = gelu(*v);
        }
    }
}

/// `vision.rotate`: of every row of `qkv [R, 3*W]` each head of q and k normed and turned by the row's `angles [R, W / heads]`
/// ([`angles`]), and v; to `q [R, W]` and `kv [R, 2*W]`, where keys and values of a head lie side by side, as the attention of
/// the text model wants them.
///
/// # Panics
/// When the shapes do not fit.
pub fn rotated(
    qkv: Rows<'_>,
    angles: Rows<'_>,
    norms: [&[f32]; 2],
    eps: f32,
    q: RowsMut<'_>,
    kv: RowsMut<'_>,
) {
    let (width, dim) = (q.cols(), angles.cols());
    let [q_norm, k_norm] = norms;
    assert_eq!((qkv.cols(), kv.cols()), (3 * width, 2 * width), "rotation: widths");
    assert_eq!((q_norm.len(), k_norm.len(), width % dim), (dim, dim, 0), "rotation: a head");
    let rows = (qkv.rows(), qkv.rows(), qkv.rows());
    assert_eq!((angles.rows(), q.rows(), kv.rows()), rows, "rotation: rows");
    let items = q.row_pieces(1).zip(kv.row_pieces(1));
    par::each(items, qkv.rows() * width * 24, |r, (mut q, mut kv): (RowsMut<'_>, RowsMut<'_>)| {
        let (q, kv) = (q.row_mut(0), kv.row_mut(0));
        let (cos, sin) = angles.row(r).split_at(dim / 2);
        let row = qkv.row(r);
        q.copy_from_slice(&row[..width]);
        for (h, q) in q.chunks_exact_mut(dim).enumerate() {
            rotate(q, q_norm, eps, cos, sin);
            let kv = &mut kv[2 * h * dim..2 * (h + 1) * dim];
            kv[..dim].copy_from_slice(&row[width + h * dim..][..dim]);
            kv[dim..].copy_from_slice(&row[2 * width + h * dim..][..dim]);
            rotate(&mut kv[..dim], k_norm, eps, cos, sin);
        }
    });
}

/// `vision.gather`: `[R * places, W]` to `[R, W * places]`, channel by channel the places of a merge block.
///
/// # Panics
/// When the shapes do not fit.
pub fn gathered(x: Rows<'_>, places: usize, out: RowsMut<'_>) {
    let mut out = out;
    assert_eq!((x.rows(), x.cols() * places), (out.rows() * places, out.cols()), "merge blocks");
    for r in 0..out.rows() {
        let group = out.row_mut(r);
        for place in 0..places {
            let row = x.row(r * places + place);
            group[place..].iter_mut().step_by(places).zip(row).for_each(|(g, v)| *g = *v);
        }
    }
}

/// `vision.gelu`: the layer norm of every row, then its gelu.
///
/// # Panics
/// When the shapes do not fit.
pub fn activated_norm(x: Rows<'_>, weight: &[f32], bias: &[f32], eps: f32, out: RowsMut<'_>) {
    let mut out = out;
    layer(x, weight, bias, eps, out.reborrow());
    let work = x.rows() * x.cols() * 64;
    par::each(out.row_pieces(1), work, |_, mut row: RowsMut<'_>| gelu_in_place(row.row_mut(0)));
}

fn normed(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    rms(Rows::new(x, weight.len()), Some(weight), eps, RowsMut::new(&mut out, weight.len()));
    out
}

fn added(x: &[f32], y: &[f32], width: usize) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    residual(Rows::new(x, width), Rows::new(y, width), RowsMut::new(&mut out, width));
    out
}

fn activated(x: &[f32], width: usize, clamp: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / 2];
    swiglu(Rows::new(x, 2 * width), clamp, RowsMut::new(&mut out, width));
    out
}

impl Tower<'_> {
    /// Rows of the language model for `pixels [P, patch]` in merge-block order, image after image.
    ///
    /// # Errors
    /// When the grids and the pixels do not agree.
    pub fn run(&self, pixels: Rows<'_>, grids: &[Grid]) -> Result<Vec<f32>, VisionError> {
        let downsampled = self.downsampled(pixels, grids)?;
        let mut z = Linear { weight: self.merger, bias: None }.run(&downsampled);
        let width = self.merger.n();
        let mut active = vec![0.0; z.len()];
        let view = RowsMut::new(&mut active, width);
        activated_norm(Rows::new(&z, width), self.merger_norm, self.merger_norm_bias, MERGER_EPS, view);
        z = active;
        let hidden = Linear { weight: self.merger_gate_up, bias: None }.run(&z);
        let hidden = activated(&hidden, self.merger_down.k(), self.shape.clamp);
        Ok(Linear { weight: self.merger_down, bias: None }.run(&hidden))
    }

    /// Rows after the downsampling convolution, before the merger.
    ///
    /// # Errors
    /// When the grids and the pixels do not agree.
    pub fn downsampled(&self, pixels: Rows<'_>, grids: &[Grid]) -> Result<Vec<f32>, VisionError> {
        let Shape { width, heads, merge, eps, clamp, theta } = self.shape;
        check(grids, merge, self.patch.weight.k(), pixels)?;
        let patches = pixels.rows();
        let angles = angles(grids, merge, width / heads, theta);
        let mut x = vec![0.0; patches * width];
        matmul(pixels, self.patch.weight, self.patch.bias, RowsMut::new(&mut x, width));
        for block in &self.blocks {
            let qkv = block.qkv.run(&normed(&x, block.norm1, eps));
            let attended = self.attend(block, &qkv, grids, &angles);
            x = added(&x, &block.proj.run(&attended), width);
            let hidden = block.gate_up.run(&normed(&x, block.norm2, eps));
            let hidden = activated(&hidden, block.down.weight.k(), clamp);
            x = added(&x, &block.down.run(&hidden), width);
        }
        let x = normed(&x, self.post_norm, eps);
        let places = merge * merge;
        let mut groups = vec![0.0; x.len()];
        gathered(Rows::new(&x, width), places, RowsMut::new(&mut groups, places * width));
        Ok(self.downsample.run(&groups))
    }

    /// Full attention inside every frame.
    fn attend(&self, block: &Block<'_>, qkv: &[f32], grids: &[Grid], angles: &[f32]) -> Vec<f32> {
        let Shape { width, heads, eps, .. } = self.shape;
        let dim = width / heads;
        let rows = Rows::new(qkv, 3 * width);
        let mut out = vec![0.0; rows.rows() * width];
        let (mut q, mut kv) = (vec![0.0; rows.rows() * width], vec![0.0; rows.rows() * 2 * width]);
        let to = (RowsMut::new(&mut q, width), RowsMut::new(&mut kv, 2 * width));
        rotated(rows, Rows::new(angles, dim), [block.q_norm, block.k_norm], eps, to.0, to.1);
        let shape = mla::Shape { heads, key: dim, value: dim };
        let scale = 1.0 / (dim as f32).sqrt();
        let mut at = 0;
        for grid in grids {
            for _ in 0..grid.frames {
                let n = grid.frame();
                let q = Rows::new(&q[at * width..(at + n) * width], width);
                let kv = Rows::new(&kv[2 * at * width..2 * (at + n) * width], 2 * width);
                let out = RowsMut::new(&mut out[at * width..(at + n) * width], width);
                mla::attention(q, kv, shape, |_| mla::Keys::Below(n), scale, out);
                at += n;
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::dense::{Elements, pack_f32};
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;

    const W: usize = 24;
    const HEADS: usize = 3;
    const PATCH: usize = 10;
    const OUT: usize = 20;
    const INNER: usize = 17;

    /// Outputs, inputs, row-major weight, bias.
    type Plane = (usize, usize, Vec<f32>, Vec<f32>);

    /// Weights of a small tower.
    struct Plain {
        data: std::collections::BTreeMap<&'static str, Plane>,
    }

    impl Plain {
        fn new() -> Self {
            let sizes = [
                ("patch", W, PATCH),
                ("qkv", 3 * W, W),
                ("proj", W, W),
                ("gate_up", 2 * INNER, W),
                ("down", W, INNER),
                ("downsample", OUT, 4 * W),
                ("merger", OUT, OUT),
                ("merger_gate_up", 2 * INNER, OUT),
                ("merger_down", OUT, INNER),
                ("norm1", 1, W),
                ("norm2", 1, W),
                ("post_norm", 1, W),
                ("q_norm", 1, W / HEADS),
                ("k_norm", 1, W / HEADS),
                ("merger_norm", 1, OUT),
                ("merger_norm_bias", 1, OUT),
            ];
            let data = sizes.iter().enumerate().map(|(i, (name, n, k))| {
                (*name, (*n, *k, random(2 * i as u64 + 50, n * k), random(2 * i as u64 + 51, *n)))
            });
            Self { data: data.collect() }
        }

        fn vector(&self, name: &str) -> &[f32] {
            &self.data[name].2
        }

        fn linear(&self, x: &[f64], name: &str, bias: bool) -> Vec<f64> {
            let (n, k, w, b) = &self.data[name];
            x.chunks_exact(*k)
                .flat_map(|x| {
                    (0..*n).map(move |o| {
                        let dot: f64 = (0..*k).map(|i| f64::from(w[o * k + i]) * x[i]).sum();
                        dot + if bias { f64::from(b[o]) } else { 0.0 }
                    })
                })
                .collect()
        }

        fn rms(&self, x: &[f64], name: &str) -> Vec<f64> {
            let w = self.vector(name);
            x.chunks_exact(w.len())
                .flat_map(|x| {
                    let r = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + 1e-5).sqrt();
                    x.iter().zip(w).map(move |(v, w)| v * r * f64::from(*w)).collect::<Vec<_>>()
                })
                .collect()
        }

        fn swiglu(x: &[f64], width: usize) -> Vec<f64> {
            x.chunks_exact(2 * width)
                .flat_map(|x| {
                    (0..width).map(move |i| {
                        let (g, u) = (x[i].min(2.0), x[width + i].clamp(-2.0, 2.0));
                        g / (1.0 + (-g).exp()) * u
                    })
                })
                .collect()
        }

        fn rope(&self, head: &[f64], norm: &str, row: usize, column: usize) -> Vec<f64> {
            let dim = W / HEADS;
            let x = self.rms(head, norm);
            let mut out = x.clone();
            for i in 0..dim / 2 {
                let quarter = dim / 4;
                let at = if i < quarter { row } else { column };
                let angle = at as f64 * 10000f64.powf(-2.0 * (i % quarter) as f64 / (dim / 2) as f64);
                out[i] = x[i] * angle.cos() - x[i + dim / 2] * angle.sin();
                out[i + dim / 2] = x[i + dim / 2] * angle.cos() + x[i] * angle.sin();
            }
            out
        }

        /// One frame of `height` x `width` patches.
        fn reference(&self, pixels: &[f32], height: usize, width: usize) -> Vec<f64> {
            let pixels: Vec<f64> = pixels.iter().map(|v| f64::from(*v)).collect();
            let mut places = Vec::new();
            for by in 0..height / 2 {
                for bx in 0..width / 2 {
                    places.extend([(0, 0), (0, 1), (1, 0), (1, 1)].map(|(y, x)| (2 * by + y, 2 * bx + x)));
                }
            }
            let add = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(a, b)| a + b).collect::<Vec<_>>();
            let mut x = self.linear(&pixels, "patch", true);
            let dim = W / HEADS;
            for _ in 0..2 {
                let qkv = self.linear(&self.rms(&x, "norm1"), "qkv", true);
                let head = |r: usize, part: usize, h: usize| &qkv[r * 3 * W + part * W + h * dim..][..dim];
                let mut attended = Vec::new();
                for (r, at) in places.iter().enumerate() {
                    for h in 0..HEADS {
                        let q = self.rope(head(r, 0, h), "q_norm", at.0, at.1);
                        let weights: Vec<f64> = places
                            .iter()
                            .enumerate()
                            .map(|(t, at)| {
                                let k = self.rope(head(t, 1, h), "k_norm", at.0, at.1);
                                let dot: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
                                (dot / (dim as f64).sqrt()).exp()
                            })
                            .collect();
                        let total: f64 = weights.iter().sum();
                        for c in 0..dim {
                            let sum: f64 =
                                weights.iter().enumerate().map(|(t, w)| w * head(t, 2, h)[c]).sum();
                            attended.push(sum / total);
                        }
                    }
                }
                x = add(&x, &self.linear(&attended, "proj", true));
                let hidden = Self::swiglu(&self.linear(&self.rms(&x, "norm2"), "gate_up", true), INNER);
                x = add(&x, &self.linear(&hidden, "down", true));
            }
            let x = self.rms(&x, "post_norm");
            let groups: Vec<f64> =
                x.chunks_exact(4 * W).flat_map(|g| (0..4 * W).map(move |i| g[i % 4 * W + i / 4])).collect();
            let z = self.linear(&self.linear(&groups, "downsample", true), "merger", false);
            let (w, b) = (self.vector("merger_norm"), self.vector("merger_norm_bias"));
            let z: Vec<f64> = z
                .chunks_exact(OUT)
                .flat_map(|z| {
                    let mean = z.iter().sum::<f64>() / OUT as f64;
                    let var = z.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / OUT as f64;
                    (0..OUT).map(move |i| {
                        let v = (z[i] - mean) / (var + 1e-5).sqrt() * f64::from(w[i]) + f64::from(b[i]);
                        0.5 * v * (1.0 + crate::cpu::math::num::erf(v / 2f64.sqrt()))
                    })
                })
                .collect();
            self.linear(&Self::swiglu(&self.linear(&z, "merger_gate_up", false), INNER), "merger_down", false)
        }
    }

    fn run(plain: &Plain, pixels: &[f32], grids: &[Grid]) -> Result<Vec<f32>, VisionError> {
        let packed: std::collections::BTreeMap<_, _> =
            plain.data.iter().map(|(name, (n, k, w, _))| (*name, pack_f32(w, *n, *k))).collect();
        let matrix = |name: &str| {
            let (n, k, _, _) = plain.data[name];
            PackedMatrix::new(n, k, Elements::F32(&packed[name])).unwrap()
        };
        let linear = |name: &str| Linear { weight: matrix(name), bias: Some(&plain.data[name].3) };
        let block = Block {
            norm1: plain.vector("norm1"),
            qkv: linear("qkv"),
            q_norm: plain.vector("q_norm"),
            k_norm: plain.vector("k_norm"),
            proj: linear("proj"),
            norm2: plain.vector("norm2"),
            gate_up: linear("gate_up"),
            down: linear("down"),
        };
        let tower = Tower {
            shape: Shape { width: W, heads: HEADS, merge: 2, eps: 1e-5, clamp: 2.0, theta: 10000.0 },
            patch: linear("patch"),
            blocks: vec![block; 2],
            post_norm: plain.vector("post_norm"),
            downsample: linear("downsample"),
            merger: matrix("merger"),
            merger_norm: plain.vector("merger_norm"),
            merger_norm_bias: plain.vector("merger_norm_bias"),
            merger_gate_up: matrix("merger_gate_up"),
            merger_down: matrix("merger_down"),
        };
        tower.run(Rows::new(pixels, PATCH), grids)
    }

    #[test]
    fn matches_double_precision() {
        let plain = Plain::new();
        let pixels = random(1, 24 * PATCH);
        let got = run(&plain, &pixels, &[Grid { frames: 1, height: 4, width: 6 }]).unwrap();
        close(&got, &plain.reference(&pixels, 4, 6), 2e-5, "vision rows");
    }

    #[test]
    fn frames_and_images_do_not_see_each_other() {
        let plain = Plain::new();
        let pixels = random(2, (2 * 8 + 16) * PATCH);
        let video = Grid { frames: 2, height: 4, width: 2 };
        let image = Grid { frames: 1, height: 4, width: 4 };
        let (scalar, all) = both_paths(|| bits(&run(&plain, &pixels, &[video, image]).unwrap()));
        assert_eq!(scalar, all);
        let one = Grid { frames: 1, ..video };
        let parts = [
            run(&plain, &pixels[..8 * PATCH], &[one]).unwrap(),
            run(&plain, &pixels[8 * PATCH..16 * PATCH], &[one]).unwrap(),
            run(&plain, &pixels[16 * PATCH..], &[image]).unwrap(),
        ];
        assert_eq!(bits(&parts.concat()), all);
    }

    #[test]
    fn grids_that_do_not_fit_are_refused() {
        let plain = Plain::new();
        let pixels = random(2, 8 * PATCH);
        let refused = |grid: Grid| run(&plain, &pixels, &[grid]).unwrap_err().to_string();
        assert!(refused(Grid { frames: 1, height: 3, width: 2 }).contains("3 x 2 patches"));
        assert!(refused(Grid { frames: 1, height: 4, width: 4 }).contains("hold 16 patches"));
    }
}
