//! The kernels' sources: CUDA C++ that needs no header of CUDA.

/// A source file with the shared parts that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Name, without `.cu`.
    pub name: &'static str,
    /// Shared parts, in order.
    pub shared: &'static [&'static str],
    /// The file.
    pub text: &'static str,
}

const COMMON: &str = include_str!("../cu/common.cuh");
const BEST: &str = include_str!("../cu/best.cuh");
const TARGET: &str = include_str!("../cu/target.cuh");
const TRELLIS: &str = include_str!("../cu/trellis.cuh");
const ATTEND: &str = include_str!("../cu/attend.cuh");
const CHAINS: &str = include_str!("../cu/chains.cuh");

/// All sources.
pub const SOURCES: &[Source] = &[
    Source { name: "act", shared: &[COMMON], text: include_str!("../cu/act.cu") },
    Source { name: "attend", shared: &[COMMON, ATTEND], text: include_str!("../cu/attend.cu") },
    Source { name: "embed", shared: &[COMMON], text: include_str!("../cu/embed.cu") },
    Source { name: "exl3", shared: &[COMMON, TARGET, TRELLIS], text: include_str!("../cu/exl3.cu") },
    Source {
        name: "exl3_tile",
        shared: &[COMMON, TARGET, TRELLIS],
        text: include_str!("../cu/exl3_tile.cu"),
    },
    Source { name: "final", shared: &[COMMON], text: include_str!("../cu/final.cu") },
    Source { name: "hc", shared: &[COMMON, CHAINS], text: include_str!("../cu/hc.cu") },
    Source { name: "idx", shared: &[COMMON, BEST], text: include_str!("../cu/idx.cu") },
    Source { name: "kda", shared: &[COMMON], text: include_str!("../cu/kda.cu") },
    Source { name: "mla", shared: &[COMMON, ATTEND], text: include_str!("../cu/mla.cu") },
    Source { name: "moe", shared: &[COMMON], text: include_str!("../cu/moe.cu") },
    Source { name: "norm", shared: &[COMMON], text: include_str!("../cu/norm.cu") },
    Source { name: "panels", shared: &[COMMON, TARGET, CHAINS], text: include_str!("../cu/panels.cu") },
    Source { name: "probe", shared: &[COMMON], text: include_str!("../cu/probe.cu") },
    Source { name: "quantize", shared: &[COMMON], text: include_str!("../cu/quantize.cu") },
    Source { name: "rows", shared: &[COMMON], text: include_str!("../cu/rows.cu") },
    Source { name: "vision", shared: &[COMMON], text: include_str!("../cu/vision.cu") },
    Source { name: "sample", shared: &[COMMON, BEST], text: include_str!("../cu/sample.cu") },
];

impl Source {
    /// The whole text that is compiled. Errors of the compiler name the part and the line in it.
    pub fn whole(&self) -> String {
        let mut text = String::new();
        for part in self.shared {
            text += part;
        }
        format!("{text}#line 1 \"{}.cu\"\n{}", self.name, self.text)
    }
}

/// A source by its name.
pub fn find(name: &str) -> Option<&'static Source> {
    SOURCES.iter().find(|s| s.name == name)
}
