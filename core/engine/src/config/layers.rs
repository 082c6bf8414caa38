//! What each layer is: `layer_types`, `mlp_layer_types`, `indexer_types` and the fields they derive from.

use super::fields::Fields;
use super::{Attention, Indexer, LayerKind, Mlp};

/// Dense layers at the front when nothing says otherwise.
const DENSE_DEFAULT: usize = 3;

/// The layers of the decoder. `extra` is the number of MTP layers, which some writers append to the lists.
pub(super) fn layers(text: Fields, linear: Option<Fields>, count: usize, extra: usize) -> Vec<LayerKind> {
    let kda = kda_layers(text, linear, count, extra);
    let own = own_indexers(text, count, extra);
    let dense = dense_layers(text, count, extra);
    let layers: Vec<LayerKind> = (0..count)
        .map(|i| LayerKind {
            attention: match (kda[i], own[i]) {
                (true, _) => Attention::Kda,
                (false, true) => Attention::Mla { indexer: Indexer::Own },
                (false, false) => Attention::Mla { indexer: Indexer::Shared },
            },
            mlp: if dense[i] { Mlp::Dense } else { Mlp::Sparse },
        })
        .collect();
    refuse_orphans(text, &layers);
    layers
}

/// Reads a list with one name a layer. `None` when absent or refused.
///
/// An entry past the last layer describes the MTP layer, which must be what MTP layers are.
fn per_layer(
    text: Fields,
    name: &str,
    count: usize,
    extra: usize,
    what: &str,
    mtp: bool,
    read: impl Fn(usize, &str) -> Option<bool>,
) -> Option<Vec<bool>> {
    let names = text.strings(name)?;
    if names.len() != count && names.len() != count + extra {
        text.refuse(name, format!("{count} entries, one a layer (it has {})", names.len()));
        return None;
    }
    let mut kinds = Vec::with_capacity(count);
    for (i, entry) in names.iter().enumerate() {
        match read(i, entry) {
            Some(kind) if i < count => kinds.push(kind),
            Some(kind) if kind == mtp => {}
            Some(_) => {
                text.refuse(name, format!("for the MTP layer (entry {i}) what the layer is, not {entry:?}"));
            }
            None => {
                text.refuse(name, format!("{what} in every entry (entry {i} is {entry:?})"));
                return None;
            }
        }
    }
    Some(kinds)
}

/// For each layer, whether it is KDA.
fn kda_layers(text: Fields, linear: Option<Fields>, count: usize, extra: usize) -> Vec<bool> {
    let written = per_layer(
        text,
        "layer_types",
        count,
        extra,
        "linear_attention, indexed_attention, deepseek_sparse_attention or full_attention",
        false,
        |_, entry| match entry {
            "linear_attention" => Some(true),
            "indexed_attention" | "deepseek_sparse_attention" | "full_attention" => Some(false),
            _ => None,
        },
    );
    let kda = written.unwrap_or_else(|| (0..count).map(|i| i % 4 != 3).collect());
    // The two lists of linear_attn_config repeat the same facts; layers count from 0, in related models from 1.
    if let Some(linear) = linear {
        for (name, wanted) in [("kda_layers", true), ("full_attn_layers", false)] {
            let Some(list) = linear.sizes(name) else { continue };
            let agrees = |first: usize| {
                let mut found = vec![false; count];
                for i in list.iter().filter_map(|i| i.checked_sub(first)).filter(|i| *i < count) {
                    found[i] = true;
                }
                found.iter().zip(&kda).all(|(found, kda)| *found == (*kda == wanted))
            };
            if !agrees(0) && !agrees(1) {
                linear.findings().warn(format!(
                    "{} contradicts layer_types (or its default), which is followed as transformers does",
                    linear.path(name)
                ));
            }
        }
    }
    kda
}

/// For each layer, whether an MLA there would have an indexer of its own.
fn own_indexers(text: Fields, count: usize, extra: usize) -> Vec<bool> {
    // At KDA layers the entries mean nothing, so only the two known words are told apart here.
    let read = |_: usize, entry: &str| match entry {
        "full" | "F" => Some(true),
        "shared" | "S" => Some(false),
        _ => None,
    };
    if text.get("indexer_types").is_some() {
        return per_layer(text, "indexer_types", count, extra, "full or shared", true, read)
            .unwrap_or_else(|| vec![true; count]);
    }
    if let Some(pattern) = text.get("index_topk_pattern") {
        let kinds: Option<Vec<bool>> = match pattern.as_str() {
            Some(letters) => letters.chars().map(|c| read(0, c.encode_utf8(&mut [0; 4]))).collect(),
            None => pattern.as_array().and_then(|list| {
                list.iter().map(|entry| entry.as_str().and_then(|entry| read(0, entry))).collect()
            }),
        };
        return match kinds {
            Some(mut kinds) if kinds.len() == count || kinds.len() == count + extra => {
                kinds.truncate(count);
                kinds
            }
            _ => {
                text.refuse(
                    "index_topk_pattern",
                    format!("{count} letters F or S, or a list of {count} words full or shared"),
                );
                vec![true; count]
            }
        };
    }
    let freq = text.size("index_topk_freq", 1, 1..=4096);
    let offset = text.size("index_skip_topk_offset", 2, 0..=4096);
    (0..count).map(|i| (i + 1).saturating_sub(offset) % freq == 0).collect()
}

/// For each layer, whether its feed-forward block is dense.
fn dense_layers(text: Fields, count: usize, extra: usize) -> Vec<bool> {
    let read = |_: usize, entry: &str| match entry {
        "dense" => Some(true),
        "sparse" => Some(false),
        _ => None,
    };
    let dense = per_layer(text, "mlp_layer_types", count, extra, "dense or sparse", false, read)
        .unwrap_or_else(|| (0..count).map(|i| i < DENSE_DEFAULT).collect());
    // Redundant, and not read by transformers. If it is the one that is right, the tensors will not fit.
    if let Some(first) = text.size_opt("first_k_dense_replace", 0..=4096) {
        let leading = dense.iter().take_while(|d| **d).count();
        if first != leading {
            text.findings().warn(format!(
                "{} is {first}, but {leading} layers are dense at the front of mlp_layer_types (or of its default), \
                 which is followed as transformers does",
                text.path("first_k_dense_replace")
            ));
        }
    }
    dense
}

/// Refuses layers that take over a choice which the layer before them cannot hand on.
fn refuse_orphans(text: Fields, layers: &[LayerKind]) {
    let shared = Attention::Mla { indexer: Indexer::Shared };
    let own = Attention::Mla { indexer: Indexer::Own };
    for (i, layer) in layers.iter().enumerate() {
        if layer.attention == shared && (i == 0 || layers[i - 1].attention != own) {
            let before = match i.checked_sub(1).map(|i| layers[i].attention) {
                None => "there is no layer before it".to_owned(),
                Some(Attention::Kda) => format!("layer {} is linear attention", i - 1),
                Some(Attention::Mla { .. }) => format!("layer {} is shared too", i - 1),
            };
            text.refuse(
                "indexer_types",
                format!("\"shared\" only directly after a latent attention layer of type \"full\" (layer {i}: {before})"),
            );
        }
    }
}
