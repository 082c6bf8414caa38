//! Names of components and their groups. An operation that no line names (another plugin's) appears under its own name.

use plugfold_abi::points::OpDone;

/// Name of an operation's component.
pub(crate) fn name(done: &OpDone<'_>) -> String {
    let plain = match done.op.get_str() {
        "embed" | "mtp.in" => "embed",
        "hc.dots" | "hc.finish" | "hc.post" | "tap" | "residual" => "hc",
        "kda.mix" | "kda.commit" => "kda.chain",
        "mla.write" | "mla.dense" => "dsa.attn",
        "mla.sparse" => "dsa.sparse_attn",
        "idx.write" | "idx.select" => "dsa.indexer",
        "moe.logits" | "moe.pick" | "moe.group" => "moe.router",
        "moe.up" | "moe.act" | "moe.down" => "moe.routed",
        "moe.combine" => "moe.combine",
        "comm.sum" => "allgather",
        "head" | "final" | "rows.pick" => "head",
        "sample.candidates" => "sample",
        // Products and norms are told by where they stand.
        "dense" | "norm" | "mlp.act" if done.site == 0 => "attention.proj",
        "dense" | "norm" | "mlp.act" => "mlp.dense",
        other => other,
    };
    let prefix = if done.program.get_str() == "mtp" { "mtp." } else { "" };
    format!("{prefix}{plain}")
}

/// Group of a component, for the table.
pub(crate) fn group(name: &str) -> &'static str {
    match name {
        n if n.starts_with("mtp.") => "MTP head absorb",
        n if n.starts_with("kda.") => "KDA block",
        "attention.proj" => "attention projections",
        "dsa.attn" | "dsa.sparse_attn" => "DSA attention",
        "dsa.indexer" => "DSA indexer/top-k",
        "moe.routed" | "moe.combine" => "MoE routed experts",
        "moe.router" => "MoE router/grouping",
        "mlp.dense" => "shared expert + dense MLP",
        "allgather" => "all-gathers",
        "hc" => "hyper-connections",
        "head" => "head",
        _ => "other",
    }
}
