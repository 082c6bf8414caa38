//! `processor_config.json`: the image settings of a checkpoint.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{ImageConfig, Resampler};
use crate::config::fields::{Fields, Findings};
use crate::config::{ConfigError, VisionConfig, parse};

impl ImageConfig {
    /// Reads the image settings of a checkpoint: `image_processor` of its `processor_config.json`, or its
    /// `preprocessor_config.json`. With neither file the defaults of transformers hold, which is logged.
    ///
    /// # Errors
    /// [`ConfigError`]: a file cannot be read, is not JSON, or asks for what this engine does not do or what does not
    /// fit the tower.
    pub fn from_dir(dir: &Path, tower: &VisionConfig) -> Result<Self, ConfigError> {
        for name in ["processor_config.json", "preprocessor_config.json"] {
            let path = dir.join(name);
            if path.exists() {
                let name = path.display().to_string();
                return Self::from_object(&name, &parse::object(&name, &parse::read(&path)?)?, tower);
            }
        }
        tracing::warn!(
            "{} holds neither processor_config.json nor preprocessor_config.json: using the image settings of \
             transformers, 16 to 8000 tokens an image",
            dir.display()
        );
        Ok(Self::new(tower))
    }

    /// Reads the text of a `processor_config.json` or a `preprocessor_config.json`.
    ///
    /// # Errors
    /// As [`ImageConfig::from_dir`].
    pub fn from_json(text: &str, tower: &VisionConfig) -> Result<Self, ConfigError> {
        let name = "processor_config.json";
        Self::from_object(name, &parse::object(name, text)?, tower)
    }

    fn from_object(name: &str, top: &Map<String, Value>, tower: &VisionConfig) -> Result<Self, ConfigError> {
        let findings = Findings::default();
        let head = Fields::new(top, "", &findings);
        let fields = match head.object("image_processor") {
            Some(map) => Fields::new(map, "image_processor", &findings),
            None => head,
        };
        let config = read(fields, tower);
        let (problems, _) = findings.into_parts();
        if problems.is_empty() {
            Ok(config)
        } else {
            Err(ConfigError::Unsupported { name: name.to_owned(), problems })
        }
    }
}

fn read(fields: Fields, tower: &VisionConfig) -> ImageConfig {
    for name in ["do_convert_rgb", "do_resize", "do_rescale", "do_normalize"] {
        fields.only(name, &json!(true));
    }
    // Pillow's number of the bicubic filter.
    if fields.get("resample").is_some_and(|v| *v != json!(3) && *v != json!("bicubic")) {
        fields.refuse("resample", "3 (bicubic)");
    }
    let factor = fields.number("rescale_factor", 1.0 / 255.0, |v| v > 0.0, "1/255");
    if (1.0 / factor - 255.0).abs() > 1e-3 {
        fields.refuse("rescale_factor", "1/255");
    }
    // The patches must be those that the tower was made for.
    for (name, wanted) in [
        ("patch_size", tower.patch),
        ("temporal_patch_size", tower.temporal_patch),
        ("merge_size", tower.merge),
    ] {
        if fields.size_opt(name, 1..=64).is_some_and(|found| found != wanted) {
            fields.refuse(name, format!("{wanted}, as vision_config says"));
        }
    }
    let defaults = ImageConfig::new(tower);
    let colours = |name: &str, default: [f32; 3], positive: bool| {
        let Some(value) = fields.get(name) else { return default };
        let list: Option<Vec<f32>> =
            value.as_array().and_then(|list| list.iter().map(|v| v.as_f64().map(|v| v as f32)).collect());
        let usable = |v: &f32| v.is_finite() && (!positive || *v > 0.0);
        match list.as_deref() {
            Some([r, g, b]) if [r, g, b].into_iter().all(usable) => [*r, *g, *b],
            _ => {
                fields.refuse(name, if positive { "three numbers above 0" } else { "three numbers" });
                default
            }
        }
    };
    let config = ImageConfig {
        expand: fields.size("patch_expand_factor", 1, 1..=8),
        min_tokens: fields.size("min_image_tokens", defaults.min_tokens, 1..=65_536),
        max_tokens: fields.size("max_image_tokens", defaults.max_tokens, 1..=65_536),
        mean: colours("image_mean", defaults.mean, false),
        std: colours("image_std", defaults.std, true),
        resampler: Resampler::Fast,
        ..defaults
    };
    if config.min_tokens > config.max_tokens {
        fields
            .refuse("min_image_tokens", format!("at most max_image_tokens, which is {}", config.max_tokens));
    }
    config
}
