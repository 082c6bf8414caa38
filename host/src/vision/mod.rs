//! Images: from what a client sends to rows that stand in for embeddings.
//!
//! A part of a message names an image by a `data:` URL, or by one that it is [fetched](fetch) from first. Its size is read from
//! the header and checked before anything is decoded. The model's own processor decides the canvas, its tower makes the rows.

mod decode;
pub mod fetch;
mod url;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plugfold_engine::checkpoint::Checkpoint;
use plugfold_engine::config::ModelConfig;
use plugfold_engine::image::{ImageConfig, Patches};
use plugfold_engine::vision::VisionTower;
use plugfold_kernels::cpu::math::vision::Grid;
use plugfold_kernels::device::Device;
use serde_json::Value;

pub use decode::Limit;
use fetch::{Wanted, is_elsewhere};

/// Kinds of parts that are images.
const KINDS: [&str; 3] = ["image_url", "input_image", "image"];

/// An image that cannot be taken; the message names the part, the limit and the mend, never the URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ImageProblem(pub String);

/// Why the images of a conversation are not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// One that cannot be.
    Problem(ImageProblem),
    /// Some have to be fetched first.
    Elsewhere(Wanted),
}

impl From<ImageProblem> for NotTaken {
    fn from(problem: ImageProblem) -> Self {
        Self::Problem(problem)
    }
}

/// Fields of a part that its image may stand in; the first that is there counts.
const FIELDS: [&str; 3] = ["image_url", "url", "image"];

/// The URL that a part names its image by.
fn address_of(part: &Value) -> Option<&str> {
    let field = FIELDS.iter().map(|field| &part[*field]).find(|v| !v.is_null())?;
    field.as_str().or_else(|| field["url"].as_str())
}

/// The parts of messages that are images, with their names.
fn parts(messages: &[Value]) -> impl Iterator<Item = (String, &Value)> {
    let contents = messages.iter().enumerate().filter_map(|(at, m)| Some((at, m["content"].as_array()?)));
    contents.flat_map(|(at, parts)| {
        let images = parts.iter().enumerate().filter(|(_, part)| is_image(part));
        images.map(move |(index, part)| (format!("messages[{at}].content[{index}]"), part))
    })
}

/// Whether a part of a message is an image.
pub fn is_image(part: &Value) -> bool {
    part["type"].as_str().is_some_and(|kind| KINDS.contains(&kind))
}

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
    /// The eyes of a checkpoint, if it has any; their tower lies on the device that `open` gives, or on the host. It must be one
    /// that no engine works on, since images are seen while forwards run.
    ///
    /// # Errors
    /// Files that cannot be read or do not fit, or a device that cannot be opened.
    pub fn load(
        dir: &Path,
        open: impl FnOnce() -> anyhow::Result<Option<Arc<dyn Device>>>,
    ) -> Result<Option<Self>, Box<dyn std::error::Error + Send + Sync>> {
        let config = ModelConfig::from_dir(dir)?;
        let Some(tower) = config.vision else { return Ok(None) };
        let tensors = Checkpoint::open(dir)?.check(&config)?;
        if !tensors.vision {
            return Ok(None);
        }
        let settings = ImageConfig::from_dir(dir, &tower)?;
        let ids = [config.media.image_start, config.media.image, config.media.image_end];
        let device = open()?;
        let tower = VisionTower::load(&tensors, &tower, device.as_ref())?;
        Ok(Some(Self::new(settings, Box::new(tower), ids)))
    }

    /// Puts the parts together.
    pub fn new(config: ImageConfig, tower: Box<dyn Tower>, ids: [u32; 3]) -> Self {
        Self { config, tower, ids }
    }

    /// The images of a conversation, in their order; each part becomes a text part that `place` gives for its number.
    ///
    /// # Errors
    /// The first image that cannot be taken; all that lie elsewhere.
    pub fn take(
        &self,
        messages: &mut [Value],
        limit: &Limit,
        place: impl Fn(usize) -> String,
    ) -> Result<Vec<Image>, NotTaken> {
        if let Some((name, _)) = parts(messages).nth(limit.images) {
            let most = limit.images;
            let problem = format!("{name}: a request may have {most} images; send fewer");
            return Err(ImageProblem(problem).into());
        }
        let elsewhere = parts(messages).filter_map(|(name, part)| Some((name, address_of(part)?.to_owned())));
        let elsewhere: Wanted = elsewhere.filter(|(_, address)| is_elsewhere(address)).collect();
        if !elsewhere.is_empty() {
            return Err(NotTaken::Elsewhere(elsewhere));
        }
        let mut images = Vec::new();
        for (at, message) in messages.iter_mut().enumerate() {
            let Some(parts) = message.get_mut("content").and_then(Value::as_array_mut) else { continue };
            for (index, part) in parts.iter_mut().enumerate() {
                if !is_image(part) {
                    continue;
                }
                let name = format!("messages[{at}].content[{index}]");
                images.push(self.image(part, name, limit)?);
                *part = serde_json::json!({"type": "text", "text": place(images.len() - 1)});
            }
        }
        Ok(images)
    }

    fn image(&self, part: &Value, name: String, limit: &Limit) -> Result<Image, ImageProblem> {
        let wrong = |problem: &str| ImageProblem(format!("{name}: {problem}"));
        let address = address_of(part).ok_or_else(|| wrong("has no URL of an image"))?;
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
