//! From an RGB image to the patches of the vision tower.
//!
//! [`ImageConfig::smart_size`] decides the canvas, [`ImageConfig::patches`] resizes in 8 bits, pads, normalizes and cuts.
//! The canvas is the same, bit for bit, as that of transformers with the chosen [`Resampler`].

mod resize;
mod settings;
#[cfg(test)]
mod tests;

use crate::config::VisionConfig;

/// Longest side of an image, in pixels.
const MAX_SIDE: usize = 1 << 20;

/// Settings of a checkpoint's `processor_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageConfig {
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Frames of a patch; an image is repeated as often.
    pub temporal_patch: usize,
    /// Side of a merge block in patches; one block gives one row.
    pub merge: usize,
    /// The canvas is a multiple of `patch × merge × expand`.
    pub expand: usize,
    /// Images that would give fewer rows are enlarged.
    pub min_tokens: usize,
    /// Images that would give more rows are shrunk.
    pub max_tokens: usize,
    /// Means of the colours, in units of the full range.
    pub mean: [f32; 3],
    /// Standard deviations of the colours, in units of the full range.
    pub std: [f32; 3],
    /// Which of the two backends is reproduced.
    pub resampler: Resampler,
}

/// The two backends that transformers resizes with. They differ by at most one level in few samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resampler {
    /// torchvision, what a default installation runs: weights of at most 16 bits.
    #[default]
    Fast,
    /// Pillow: weights of 22 bits.
    Pil,
}

/// Where an image comes to lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Height and width of the canvas in pixels.
    pub canvas: (usize, usize),
    /// Height and width of the image at the canvas' upper left corner.
    pub content: (usize, usize),
    /// Patches: groups of frames, rows, columns.
    pub grid: (usize, usize, usize),
    /// Rows that the tower makes of it, the number of placeholders in the prompt.
    pub tokens: usize,
}

/// The patches of one image.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// Groups of frames, rows, columns.
    pub grid: (usize, usize, usize),
    /// `[patches, channels × frames × patch × patch]` row-major. Patches go by merge block: block row, block column,
    /// row and column inside the block.
    pub values: Vec<f32>,
}

/// An image that cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// It has no pixels.
    #[error("the image is {height} by {width} pixels; both must be at least 1")]
    Empty {
        /// Height in pixels.
        height: usize,
        /// Width in pixels.
        width: usize,
    },
    /// It has more pixels than the caller allows.
    #[error(
        "the image is {height} by {width} pixels; at most {limit} in all are accepted: send a smaller one"
    )]
    TooLarge {
        /// Height in pixels.
        height: usize,
        /// Width in pixels.
        width: usize,
        /// The most pixels.
        limit: usize,
    },
    /// The buffer does not hold the pixels that the size promises.
    #[error("the image is {height} by {width} pixels, {expected} bytes of RGB, but its buffer has {found}")]
    Length {
        /// Height in pixels.
        height: usize,
        /// Width in pixels.
        width: usize,
        /// Bytes of that size.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
}

impl ImageConfig {
    /// What transformers assumes when nothing is configured, for a tower of the given patches. Equal to the published
    /// settings.
    #[allow(clippy::excessive_precision, reason = "the digits as they are published")]
    pub fn new(tower: &VisionConfig) -> Self {
        Self {
            patch: tower.patch,
            temporal_patch: tower.temporal_patch,
            merge: tower.merge,
            expand: 1,
            min_tokens: 16,
            max_tokens: 8000,
            mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
            std: [0.268_629_54, 0.261_302_58, 0.275_777_11],
            resampler: Resampler::Fast,
        }
    }

    /// Side in pixels of which the canvas is a multiple.
    fn factor(&self) -> usize {
        self.patch * self.merge * self.expand
    }

    /// Canvas, content and rows of an image of `height × width` pixels. The arithmetic is that of transformers,
    /// float64 in the same order, because its floors are visible in the result.
    ///
    /// # Errors
    /// [`ImageError::Empty`]; [`ImageError::TooLarge`] for more than `max_pixels` pixels or a side over 2²⁰.
    pub fn smart_size(&self, height: usize, width: usize, max_pixels: usize) -> Result<Sizes, ImageError> {
        if height == 0 || width == 0 {
            return Err(ImageError::Empty { height, width });
        }
        let sides = height.max(width) <= MAX_SIDE;
        if !sides || height * width > max_pixels {
            let limit = max_pixels.min(MAX_SIDE * MAX_SIDE);
            return Err(ImageError::TooLarge { height, width, limit });
        }
        let canvas = self.canvas(height, width);
        let content = self.content(height, width, canvas);
        let grid = (1, canvas.0 / self.patch, canvas.1 / self.patch);
        Ok(Sizes { canvas, content, grid, tokens: grid.1 * grid.2 / (self.merge * self.merge) })
    }

    fn canvas(&self, height: usize, width: usize) -> (usize, usize) {
        let factor = self.factor();
        let unit = factor * factor;
        let up = |v: usize| v.div_ceil(factor) * factor;
        let (h, w) = (height as f64, width as f64);
        let mut canvas = (up(height), up(width));
        if canvas.0 * canvas.1 < self.min_tokens * unit {
            let grow = ((self.min_tokens * unit) as f64 / (height * width) as f64).sqrt();
            let grown = |side: f64| up(((side * grow).ceil() as usize).max(1));
            canvas = (grown(h), grown(w));
        }
        if canvas.0 * canvas.1 > self.max_tokens * unit {
            // The greatest content height whose canvas fits.
            canvas = (factor, factor);
            let (mut low, mut high) = (1, height);
            while low <= high {
                let mid = usize::midpoint(low, high);
                let across = (((width * mid) as f64 / h).floor() as usize).max(1);
                if up(mid) * up(across) <= self.max_tokens * unit {
                    canvas = (up(mid), up(across));
                    low = mid + 1;
                } else {
                    high = mid - 1;
                }
            }
        }
        canvas
    }

    fn content(&self, height: usize, width: usize, canvas: (usize, usize)) -> (usize, usize) {
        let factor = self.factor();
        let mut scale = (canvas.0 as f64 / height as f64).min(canvas.1 as f64 / width as f64);
        // Large enough images are padded, not enlarged.
        if height * width >= factor * factor * self.min_tokens {
            scale = scale.min(1.0);
        }
        let side = |v: usize, limit: usize| ((v as f64 * scale).floor() as usize).min(limit).max(1);
        (side(height, canvas.0), side(width, canvas.1))
    }

    /// The patches of an image, `rgb` being its pixels `[height, width, 3]` in 8 bits.
    ///
    /// # Errors
    /// As [`ImageConfig::smart_size`], and [`ImageError::Length`].
    pub fn patches(
        &self,
        rgb: &[u8],
        height: usize,
        width: usize,
        max_pixels: usize,
    ) -> Result<Patches, ImageError> {
        let sizes = self.smart_size(height, width, max_pixels)?;
        let expected = height * width * 3;
        if rgb.len() != expected {
            return Err(ImageError::Length { height, width, expected, found: rgb.len() });
        }
        let canvas = self.paint(rgb, (height, width), &sizes);
        Ok(Patches { grid: sizes.grid, values: self.cut(&canvas, sizes.canvas) })
    }

    /// The canvas `[height, width, 3]` with the resized image in its upper left corner and 0 elsewhere.
    fn paint(&self, rgb: &[u8], size: (usize, usize), sizes: &Sizes) -> Vec<u8> {
        let (height, width) = sizes.content;
        let content = resize::resize(rgb, size, sizes.content, self.resampler);
        let mut canvas = vec![0; sizes.canvas.0 * sizes.canvas.1 * 3];
        for (to, from) in
            canvas.chunks_exact_mut(sizes.canvas.1 * 3).zip(content.chunks_exact(width * 3)).take(height)
        {
            to[..width * 3].copy_from_slice(from);
        }
        canvas
    }

    /// Normalizes a canvas and cuts it into patches.
    fn cut(&self, canvas: &[u8], (height, width): (usize, usize)) -> Vec<f32> {
        // As torchvision does it: mean and deviation are brought to 0..255 instead of the pixel to 0..1.
        let levels: [[f32; 256]; 3] = std::array::from_fn(|c| {
            let (mean, std) = (self.mean[c] * 255.0, self.std[c] * 255.0);
            std::array::from_fn(|level| (level as f32 - mean) / std)
        });
        let (patch, merge) = (self.patch, self.merge);
        let (rows, cols) = (height / patch, width / patch);
        let area = patch * patch;
        let mut values = Vec::with_capacity(rows * cols * 3 * self.temporal_patch * area);
        for block in 0..rows / merge * (cols / merge) {
            let (block_row, block_col) = (block / (cols / merge), block % (cols / merge));
            for inside in 0..merge * merge {
                let top = (block_row * merge + inside / merge) * patch;
                let left = (block_col * merge + inside % merge) * patch;
                for (channel, level) in levels.iter().enumerate() {
                    let start = values.len();
                    for row in top..top + patch {
                        let from = (row * width + left) * 3 + channel;
                        let line = canvas[from..].iter().step_by(3).take(patch);
                        values.extend(line.map(|v| level[usize::from(*v)]));
                    }
                    // The same frame for every moment of the patch.
                    for _ in 1..self.temporal_patch {
                        values.extend_from_within(start..start + area);
                    }
                }
            }
        }
        values
    }
}
