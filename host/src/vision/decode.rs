//! From the bytes of a picture to pixels, within bounds.

use std::io::Cursor;

use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

/// Bounds on the images of a request.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// Images of a request.
    pub images: usize,
    /// Encoded bytes of one.
    pub bytes: usize,
    /// Pixels of one.
    pub pixels: usize,
}

/// Longest side in pixels.
const SIDE: u32 = 1 << 16;

fn reader<'b>(bytes: &'b [u8], limit: &Limit) -> Result<ImageReader<Cursor<&'b [u8]>>, String> {
    let mut reader = ImageReader::new(Cursor::new(bytes))
        .with_guessed_format()
        .map_err(|e| format!("cannot be read: {e}"))?;
    if !matches!(
        reader.format(),
        Some(ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP | ImageFormat::Gif)
    ) {
        return Err("is not a PNG, JPEG, WebP or GIF image".into());
    }
    let mut limits = Limits::no_limits();
    limits.max_image_width = Some(SIDE);
    limits.max_image_height = Some(SIDE);
    // Up to 8 bytes a pixel, and what decoders need besides.
    limits.max_alloc = Some(limit.pixels as u64 * 8 + (64 << 20));
    reader.limits(limits);
    Ok(reader)
}

/// (height, width), from the header alone.
///
/// # Errors
/// A picture that is none, or too large.
pub fn size(bytes: &[u8], limit: &Limit) -> Result<(usize, usize), String> {
    let (width, height) = reader(bytes, limit)?.into_dimensions().map_err(|e| problem(&e))?;
    let (height, width) = (height as usize, width as usize);
    if height.saturating_mul(width) > limit.pixels {
        let most = limit.pixels;
        return Err(format!(
            "is {height} by {width} pixels; at most {most} in all are accepted: send a smaller one"
        ));
    }
    Ok((height, width))
}

fn problem(error: &image::ImageError) -> String {
    match error {
        image::ImageError::Limits(_) => "needs more memory than is allowed: send a smaller one".into(),
        other => format!("does not decode: {other}"),
    }
}

/// The pixels as RGB bytes, with (height, width). Transparency is put on white; of several frames the first counts.
///
/// # Errors
/// A picture that does not decode.
pub fn rgb(bytes: &[u8], limit: &Limit) -> Result<(Vec<u8>, usize, usize), String> {
    // Checked again: the decoder allocates by the header.
    let (height, width) = size(bytes, limit)?;
    let decoder = reader(bytes, limit)?.into_decoder().map_err(|e| problem(&e))?;
    let colour = decoder.color_type();
    let picture = DynamicImage::from_decoder(decoder).map_err(|e| problem(&e))?;
    if !colour.has_alpha() {
        return Ok((picture.into_rgb8().into_raw(), height, width));
    }
    let pixels = picture.into_rgba8();
    let mut out = Vec::with_capacity(height * width * 3);
    for pixel in pixels.pixels() {
        let [r, g, b, a] = pixel.0;
        // As Pillow composites: rounded, exact at both ends.
        let over = |c: u8| {
            let mixed = u32::from(c) * u32::from(a) + 255 * (255 - u32::from(a)) + 128;
            ((mixed + (mixed >> 8)) >> 8) as u8
        };
        out.extend([over(r), over(g), over(b)]);
    }
    Ok((out, height, width))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Limit = Limit { images: 8, bytes: 1 << 20, pixels: 1 << 20 };

    fn encoded(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut out = Cursor::new(Vec::new());
        picture.write_to(&mut out, format).unwrap();
        out.into_inner()
    }

    #[test]
    fn formats_and_transparency() {
        let clear =
            image::RgbaImage::from_fn(3, 2, |x, _| image::Rgba([10, 20, 30, [0, 128, 255][x as usize]]));
        let png = encoded(&DynamicImage::ImageRgba8(clear), ImageFormat::Png);
        let (pixels, height, width) = rgb(&png, &LIMIT).unwrap();
        assert_eq!((height, width), (2, 3));
        assert_eq!(pixels[..9], [255, 255, 255, 132, 137, 142, 10, 20, 30]);
        let plain = DynamicImage::ImageRgb8(image::RgbImage::from_pixel(5, 4, image::Rgb([200, 100, 50])));
        for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif] {
            let bytes = encoded(&plain, format);
            let (pixels, height, width) = rgb(&bytes, &LIMIT).unwrap_or_else(|e| panic!("{format:?}: {e}"));
            assert_eq!((height, width, pixels.len()), (4, 5, 60), "{format:?}");
            assert!(pixels[0].abs_diff(200) < 8, "{format:?}");
        }
    }

    /// A PNG header without pixels.
    fn header(width: u32, height: u32) -> Vec<u8> {
        let mut chunk = b"IHDR".to_vec();
        chunk.extend(width.to_be_bytes());
        chunk.extend(height.to_be_bytes());
        chunk.extend([8, 2, 0, 0, 0]);
        let mut crc = u32::MAX;
        for byte in &chunk {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
            }
        }
        let mut out = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0d".to_vec();
        out.extend(&chunk);
        out.extend((!crc).to_be_bytes());
        // The decoder reads up to the first data.
        out.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e");
        out
    }

    #[test]
    fn case_22_bombs_are_refused_from_the_header() {
        for (bytes, words) in [
            (header(16384, 16384), "at most 1048576"),
            (header(40000, 40000), "at most 1048576"),
            (header(100_000, 1), "more memory"),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>".to_vec(), "not a PNG"),
            (b"II*\0\x08\0\0\0".to_vec(), "not a PNG"),
            (b"#?RADIANCE\n".to_vec(), "not a PNG"),
            (Vec::new(), "not a PNG"),
        ] {
            let problem = size(&bytes, &LIMIT).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
        let plain = DynamicImage::ImageRgb8(image::RgbImage::new(64, 64));
        let jpeg = encoded(&plain, ImageFormat::Jpeg);
        assert!(rgb(&jpeg[..jpeg.len() / 3], &LIMIT).is_err());
    }
}
