//! Classes of matrices outside of the routed experts, and the service that says how each is stored.

use plugfold_abi::{List, Text, TextBuf};

/// A class of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// Name, as in settings.
    pub name: &'static str,
    /// Role of its matrices.
    pub role: &'static str,
    /// Whether the multi-token-prediction layer has it.
    pub mtp: bool,
}

const fn class(name: &'static str, role: &'static str, mtp: bool) -> Class {
    Class { name, role, mtp }
}

/// All classes. The projections into sparse attention and those into its indexer are one matrix of the engine, so
/// `dsa_proj` and `idx_proj` have one role.
pub const CLASSES: [Class; 16] = [
    class("kda_proj", "kda.in", false),
    class("kda_fb", "kda.f_b", false),
    class("kda_gb", "kda.g_b", false),
    class("kda_out", "kda.o", false),
    class("dsa_proj", "mla.in", true),
    class("dsa_qb", "mla.q_b", true),
    class("dsa_kvb", "mla.kv_b", true),
    class("dsa_out", "mla.o", true),
    class("idx_proj", "mla.in", true),
    class("idx_qb", "idx.q_b", true),
    class("dense_gu", "mlp.gate_up", false),
    class("dense_down", "mlp.down", false),
    class("shared_gu", "shared.gate_up", true),
    class("shared_down", "shared.down", true),
    class("mtp_eh", "mtp.eh", true),
    class("lm_head", "head", false),
];

/// The place in [`CLASSES`] of a matrix of this role; nothing for experts and for what is never stored otherwise.
pub fn class_of(role: &str) -> Option<usize> {
    CLASSES.iter().position(|class| class.role == role)
}

/// Slices of the shapes that the two-rank model has, by outputs and inputs of a rank. They are part of the arithmetic.
const SLICES: [(u32, u32, usize); 12] = [
    (12576, 4096, 4),
    (2048, 4096, 4),
    (8192, 1536, 4),
    (8192, 512, 4),
    (4096, 6144, 4),
    (4096, 4096, 2),
    (4096, 1024, 2),
    (4096, 1536, 2),
    (4096, 8192, 8),
    (160, 4096, 8),
    (12288, 4096, 1),
    (4096, 128, 1),
];
/// Inputs of a slice of other shapes, at least.
const SLICE_INPUTS: usize = 1024;
/// Most slices of other shapes.
const MOST_SLICES: usize = 4;

/// Slices of a matrix of so many outputs and inputs of a rank: by its shape alone, never by the rows of a call. A head has
/// one. Whoever uses them halves them until they divide its groups.
pub fn slices(role: &str, n: u32, k: u32) -> usize {
    if role == "head" {
        return 1;
    }
    let known = SLICES.iter().find(|(outputs, inputs, _)| (*outputs, *inputs) == (n, k));
    known.map_or_else(
        || {
            let most = (k as usize / SLICE_INPUTS).clamp(1, MOST_SLICES);
            // A power of two, which halving brings down to what divides the groups.
            1 << most.ilog2()
        },
        |(.., slices)| *slices,
    )
}

/// Mode of a class outside of the multi-token-prediction layer, and in it.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// In the layers of the model.
    pub main: TextBuf,
    /// In the multi-token-prediction layer.
    pub mtp: TextBuf,
}

plugfold_abi::interface! {
    /// Class of matrix -> how it is stored.
    "weight-classes", 0: WeightClasses, WeightClassesObject, WeightClassesTable {
        /// The mode of a class of [`CLASSES`], by its place: `bf16`, `q4`, `q4mse`, or one that another plugin brings.
        fn mode(&self, class: u32, mtp: bool) -> TextBuf;
        /// The mode's name where all classes have one, else `map:` and the sorted table.
        fn key(&self) -> TextBuf;
        /// Whether every class stays in bf16: the automatic draft policy asks.
        fn all_bf16(&self) -> bool;
        /// Puts another table in force, in order of [`CLASSES`]; before weights are loaded. `owner` is told in the log.
        fn assign(&self, owner: Text<'_>, table: List<Assigned>) -> ();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_a_matter_of_shape() {
        for (n, k, want) in SLICES {
            assert_eq!(slices("kda.in", n, k), want, "[{n}, {k}]");
        }
        assert_eq!(slices("head", 77_440, 4096), 1);
        for (k, want) in [(128, 1), (1023, 1), (2048, 2), (3100, 2), (4096, 4), (1 << 20, 4)] {
            assert_eq!(slices("kda.o", 7, k), want, "{k}");
        }
    }

    #[test]
    fn names_are_unique_and_every_role_has_a_class() {
        for (i, class) in CLASSES.iter().enumerate() {
            assert!(CLASSES[i + 1..].iter().all(|other| other.name != class.name));
            let found = class_of(class.role).unwrap_or(usize::MAX);
            assert_eq!(CLASSES[found].role, class.role);
        }
        for role in ["experts.gate_up", "experts.down", "moe.router", "hc.fn", "embed", "norm"] {
            assert_eq!(class_of(role), None, "{role}");
        }
    }
}
