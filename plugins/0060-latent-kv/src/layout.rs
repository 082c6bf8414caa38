//! The cache table: rows of `mla.kv` become latents.

use plugfold_abi::points::{Families, Host, HostObject, LayoutLink, Level, Owner};
use plugfold_abi::{OpError, Text};

use crate::{FAMILY, FORMAT};

/// The link of the `cache.layout` chain.
pub struct Rows {
    /// Told what a token takes.
    pub host: Option<&'static HostObject>,
}

/// Bytes of a token over all layers of all families with positions.
fn token_bytes(families: &Families) -> f64 {
    let of = |f: &plugfold_abi::points::Family| {
        f.row_bytes as f64 * f.layers.len() as f64 / f64::from(f.positions_a_row)
    };
    families.all.iter().filter(|f| f.positions_a_row > 0).map(of).sum()
}

impl LayoutLink for Rows {
    fn edit(&self, families: &mut Families) -> Result<(), OpError> {
        let before = token_bytes(families);
        let row_bytes = 4 * u64::from(families.mla_latent);
        if row_bytes == 0 {
            return Err(OpError::invalid(
                "this model has latents of 0 channels: latent_kv = 1 needs some, set latent_kv = 0",
            ));
        }
        let mut found = 0;
        for family in families.named(FAMILY).filter(|f| f.owner != Owner::Drafter) {
            family.format = FORMAT.into();
            family.row_bytes = row_bytes;
            found += 1;
        }
        if found == 0 {
            return Err(OpError::invalid(format!(
                "there is no cache family {FAMILY}: latent_kv = 1 has nothing to change in this model, set latent_kv = 0"
            )));
        }
        if let Some(host) = self.host {
            let after = token_bytes(families);
            let total = after * f64::from(families.context) / f64::from(1 << 30);
            host.log(
                Level::Info,
                Text::from(&*format!(
                    "latent cache: {:.2} KiB a token on this rank (per head: {:.2}), {total:.3} GiB for a slot of {} tokens",
                    after / 1024.0,
                    before / 1024.0,
                    families.context
                )),
            )?;
        }
        Ok(())
    }
}
