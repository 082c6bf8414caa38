//! Images: from what a client sends to rows that stand in for embeddings.
//!
//! A part of a message names an image by a `data:` URL. Its size is read from the header and checked before anything is
//! decoded. The model's own processor decides the canvas, its tower makes the rows.

mod decode;
mod url;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plugfold_engine::checkpoint::Checkpoint;
use plugfold_engine::config::ModelConfig;
use plugfold_engine::image::{ImageConfig, Patches};
use plugfold_engine::vision::VisionTower;
use plugfold_kernels::cpu::math::vision::Grid;
use serde_json::Value;

pub use decode::Limit;

/// Kinds of parts that are images.
pub const KINDS: [&str; 3] = ["image_url", "input_image", "image"];

/// An image that cannot be taken; the message names the part, the limit and the mend, never the URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ImageProblem(pub String);

/// Makes rows of patches.
pub trait Tower: Send + Sync {
    /// Rows `[tokens, hidden]` of one image.
    ///
    /// # Errors
    /// Why it failed.
    fn rows(&self, patches: &Patches) -> Result<Vec<f32>, String>;
}

impl Tower for VisionTower {
    fn rows(&self, patches: &Patches) -> Result<Vec<f32>, String> {
        let (frames, height, width) = patches.grid;
        let grid = Grid { frames, height, width };
        VisionTower::rows(self, &patches.values, &[grid]).map_err(|e| e.to_string())
    }
}

/// The eyes of a model.
pub struct Vision {
    config: ImageConfig,
    tower: Box<dyn Tower>,
    /// Ids around and in place of an image: begin, row, end.
    pub ids: [u32; 3],
}

/// An image of a request.
#[derive(Clone, Debug)]
pub struct Image {
    /// Rows it takes in the prompt.
    pub tokens: usize,
    bytes: Vec<u8>,
    name: String,
}

/// Rows of all images of a request, and the seconds that they took.
pub struct Rows {
    /// A block for each image.
    pub rows: Vec<Arc<[f32]>>,
    /// Seconds of decoding and of the tower.
    pub seconds: f64,
}

impl Vision {
    /// The eyes of a checkpoint, if it has any.
    ///
    /// # Errors
    /// Files that cannot be read or do not fit.
    pub fn load(dir: &Path) -> Result<Option<Self>, Box<dyn std::error::Error + Send + Sync>> {
        let config = ModelConfig::from_dir(dir)?;
        let Some(tower) = config.vision else { return Ok(None) };
        let tensors = Checkpoint::open(dir)?.check(&config)?;
        if !tensors.vision {
            return Ok(None);
        }
        let settings = ImageConfig::from_dir(dir, &tower)?;
        let ids = [config.media.image_start, config.media.image, config.media.image_end];
        Ok(Some(Self::new(settings, Box::new(VisionTower::load(&tensors, &tower)?), ids)))
    }

    /// Puts the parts together.
    pub fn new(config: ImageConfig, tower: Box<dyn Tower>, ids: [u32; 3]) -> Self {
        Self { config, tower, ids }
    }

    /// The images of a conversation, in their order; each part becomes a text part that `place` gives for its number.
    ///
    /// # Errors
    /// The first image that cannot be taken.
    pub fn take(
        &self,
        messages: &mut [Value],
        limit: &Limit,
        place: impl Fn(usize) -> String,
    ) -> Result<Vec<Image>, ImageProblem> {
        let mut images = Vec::new();
        for (at, message) in messages.iter_mut().enumerate() {
            let Some(parts) = message.get_mut("content").and_then(Value::as_array_mut) else { continue };
            for (index, part) in parts.iter_mut().enumerate() {
                if !part["type"].as_str().is_some_and(|kind| KINDS.contains(&kind)) {
                    continue;
                }
                let name = format!("messages[{at}].content[{index}]");
                if images.len() == limit.images {
                    let most = limit.images;
                    return Err(ImageProblem(format!(
                        "{name}: a request may have {most} images; send fewer"
                    )));
                }
                images.push(self.image(part, name, limit)?);
                *part = serde_json::json!({"type": "text", "text": place(images.len() - 1)});
            }
        }
        Ok(images)
    }

    fn image(&self, part: &Value, name: String, limit: &Limit) -> Result<Image, ImageProblem> {
        let wrong = |problem: &str| ImageProblem(format!("{name}: {problem}"));
        let field = ["image_url", "url", "image"].iter().map(|field| &part[*field]).find(|v| !v.is_null());
        let address = field.and_then(|value| value.as_str().or_else(|| value["url"].as_str()));
        let address = address.ok_or_else(|| wrong("has no URL of an image"))?;
        let bytes = url::data(address, limit.bytes).map_err(|e| wrong(&e))?;
        let (height, width) = decode::size(&bytes, limit).map_err(|e| wrong(&e))?;
        let sizes = self.config.smart_size(height, width, limit.pixels).map_err(|e| wrong(&e.to_string()))?;
        Ok(Image { tokens: sizes.tokens, bytes, name })
    }

    /// The rows of images.
    ///
    /// # Errors
    /// An image that does not decode.
    pub fn rows(&self, images: Vec<Image>, limit: &Limit) -> Result<Rows, ImageProblem> {
        let begun = Instant::now();
        let mut rows = Vec::with_capacity(images.len());
        for image in images {
            let wrong = |problem: String| ImageProblem(format!("{}: {problem}", image.name));
            let (rgb, height, width) = decode::rgb(&image.bytes, limit).map_err(wrong)?;
            let patches = self.config.patches(&rgb, height, width, limit.pixels);
            let patches = patches.map_err(|e| wrong(e.to_string()))?;
            rows.push(Arc::from(self.tower.rows(&patches).map_err(wrong)?));
        }
        Ok(Rows { rows, seconds: begun.elapsed().as_secs_f64() })
    }
}
