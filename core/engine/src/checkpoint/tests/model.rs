//! Holding a checkpoint against a configuration.

use serde_json::json;

use super::super::inventory;
use super::*;
use crate::checkpoint::CheckpointError;

/// What `check` says of the tiny model with some tensors altered.
fn check(tensors: &Tensors, config: &ModelConfig) -> Result<super::super::Resolved, Vec<CheckpointError>> {
    let dir = single(&file(tensors, 0));
    Checkpoint::open(dir.path()).unwrap().check(config).map_err(|e| e.errors)
}

fn parse(config: &Value) -> ModelConfig {
    ModelConfig::from_json(&config.to_string()).unwrap()
}

/// The names under which transformers itself would save the same model.
fn transformers() -> Tensors {
    let mut tensors = tiny();
    let config = config();
    let mut put = Tensors::new();
    let mut stack = |tensors: &mut Tensors, names: Vec<String>, to: String, shape: Vec<usize>| {
        let parts: Vec<Tensor> = names.iter().map(|name| tensors.remove(name).unwrap()).collect();
        let bytes = parts.iter().flat_map(|t| t.bytes.clone()).collect();
        put.insert(to, Tensor::new(parts[0].dtype, &shape, bytes));
    };
    for i in 0..=config.layers.len() {
        let at = format!("model.language_model.layers.{i}.");
        if tensors.contains_key(&format!("{at}self_attn.q_conv1d.weight")) {
            let names = ["q", "k", "v"].map(|x| format!("{at}self_attn.{x}_conv1d.weight")).to_vec();
            let shape = vec![3 * config.kda.channels(), 1, config.kda.taps];
            stack(&mut tensors, names, format!("{at}self_attn.conv1d.weight"), shape);
        }
        if tensors.contains_key(&format!("{at}mlp.gate.weight")) {
            let (experts, width, hidden) = (config.moe.experts, config.moe.width, config.hidden_size);
            let both = |e: usize| ["gate", "up"].map(|x| format!("{at}mlp.experts.{e}.{x}_proj.weight"));
            let shape = vec![experts, 2 * width, hidden];
            stack(
                &mut tensors,
                (0..experts).flat_map(both).collect(),
                format!("{at}mlp.experts.gate_up_proj"),
                shape,
            );
            let down = |e: usize| format!("{at}mlp.experts.{e}.down_proj.weight");
            let shape = vec![experts, hidden, width];
            stack(
                &mut tensors,
                (0..experts).map(down).collect(),
                format!("{at}mlp.experts.down_proj"),
                shape,
            );
        }
    }
    put.append(&mut tensors);
    let forget = ["f_a_proj", "f_b_proj", "dt_bias", "A_log"];
    put.into_iter()
        .map(|(name, tensor)| {
            let mut name = name.replace(".hc_attn_", ".attn_hc.").replace(".hc_ffn_", ".ffn_hc.");
            for part in forget {
                name = name.replace(&format!(".self_attn.{part}"), &format!(".self_attn.forget_gate.{part}"));
            }
            (name, tensor)
        })
        .collect()
}

#[test]
fn the_tiny_checkpoint_is_complete_and_nothing_is_left_over() {
    let checkpoint = Checkpoint::open(Path::new(TINY)).unwrap();
    assert_eq!(checkpoint.bytes(), 9_264_656);
    let resolved = checkpoint.check(&config()).unwrap();
    assert!(resolved.mtp && resolved.vision);
    assert_eq!((resolved.warnings.len(), resolved.unused.len()), (0, 0));
    for tensor in inventory(&config()) {
        let data = resolved.tensor(&tensor.name).unwrap();
        let stored = checkpoint.tensor(&tensor.name).unwrap();
        assert_eq!((data.dtype, data.shape), (stored.dtype, &tensor.shape[..]));
        assert!(std::ptr::eq(data.bytes, stored.bytes), "{} was copied", tensor.name);
    }
}

#[test]
fn the_names_of_transformers_give_the_same_values() {
    let plain = Checkpoint::open(Path::new(TINY)).unwrap().check(&config()).unwrap();
    let renamed = transformers();
    assert!(renamed.len() < tiny().len() / 2);
    let other = check(&renamed, &config()).ok().unwrap();
    assert_eq!(other.unused, Vec::<String>::new());
    for tensor in inventory(&config()) {
        let (a, b) = (plain.tensor(&tensor.name).unwrap(), other.tensor(&tensor.name).unwrap());
        assert!(a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes, "{}", tensor.name);
    }
}

#[test]
fn a_text_only_checkpoint_may_leave_out_the_name_of_the_text_model() {
    let mut json = config_json();
    json.as_object_mut().unwrap().remove("vision_config");
    let tensors: Tensors = tiny()
        .into_iter()
        .filter(|(name, _)| !name.contains("visual"))
        .map(|(name, tensor)| (name.replace("model.language_model.", "model."), tensor))
        .collect();
    let resolved = check(&tensors, &parse(&json)).ok().unwrap();
    assert!(resolved.mtp && !resolved.vision && resolved.unused.is_empty());
}

#[test]
fn parts_may_be_missing_as_a_whole_only() {
    let mut tensors = tiny();
    tensors.retain(|name, _| !name.contains("layers.8."));
    let resolved = check(&tensors, &config()).ok().unwrap();
    assert!(!resolved.mtp && resolved.vision);
    assert!(resolved.warnings[0].contains("an MTP layer"), "{:?}", resolved.warnings);

    let mut tensors = tiny();
    tensors.retain(|name, _| !name.contains("visual"));
    let resolved = check(&tensors, &config()).ok().unwrap();
    assert!(resolved.mtp && !resolved.vision);
    assert!(resolved.warnings[0].contains("a vision tower"), "{:?}", resolved.warnings);

    // One tensor left of each: all others are missing.
    let mut tensors = tiny();
    tensors.retain(|name, _| {
        let part = name.contains("visual") || name.contains("layers.8.");
        !part || name.ends_with("visual.post_layernorm.weight") || name.ends_with("layers.8.enorm.weight")
    });
    let part = |name: &str| name.contains("visual") || name.contains("layers.8.");
    let parts = inventory(&config()).iter().filter(|t| part(&t.name)).count();
    let errors = check(&tensors, &config()).err().unwrap();
    assert_eq!(errors.len(), parts - 2);
    assert!(errors.iter().all(|e| matches!(e, CheckpointError::Missing { .. })));

    // A configuration that promises neither.
    let mut json = config_json();
    json.as_object_mut().unwrap().remove("vision_config");
    json["text_config"]["num_nextn_predict_layers"] = json!(0);
    let resolved = check(&tiny(), &parse(&json)).ok().unwrap();
    assert!(!resolved.mtp && !resolved.vision);
    assert!(!resolved.contains("model.visual.post_layernorm.weight"));
    assert_eq!(resolved.warnings.len(), 1);
    assert!(resolved.warnings[0].contains("are not read"), "{:?}", resolved.warnings);
}

#[test]
fn all_that_is_wrong_is_listed_at_once() {
    let at = "model.language_model.layers.0.";
    let mut tensors = tiny();
    tensors.remove(&format!("{at}input_layernorm.weight"));
    let q = tensors.get_mut(&format!("{at}self_attn.q_proj.weight")).unwrap();
    q.shape = vec![64, 256];
    // In 16 bits this parameter would lose its meaning.
    tensors.insert(format!("{at}self_attn.A_log"), Tensor::new(Dtype::BF16, &[4], vec![0; 8]));
    tensors.insert(format!("{at}hc_attn_scale"), Tensor::new(Dtype::F32, &[1, 3], vec![0; 12]));
    tensors.insert("lm_head.weight".to_owned(), Tensor::new(Dtype::I8, &[512, 128], vec![0; 512 * 128]));
    let dir = single(&file(&tensors, 0));
    let errors = Checkpoint::open(dir.path()).unwrap().check(&config()).err().unwrap();
    let text = errors.to_string();
    assert_eq!(errors.errors.len(), 5, "{text}");
    for words in [
        "tensor model.language_model.layers.0.input_layernorm.weight is missing".to_owned(),
        format!("tensor {at}self_attn.q_proj.weight has shape [64, 256]; the configuration says [128, 128]"),
        format!("tensor {at}self_attn.A_log is stored as BF16; accepted here: F32"),
        format!("tensor {at}hc_attn_scale has shape [1, 3]; the configuration says [3]"),
        "tensor lm_head.weight is stored as I8; accepted here: BF16, F32".to_owned(),
    ] {
        assert!(text.contains(&words), "{words} is not in: {text}");
    }
    assert!(text.contains("model.safetensors: tensor"), "{text}");
}

#[test]
fn a_configuration_of_another_size_lists_shapes() {
    let mut json = config_json();
    json["text_config"]["moe_intermediate_size"] = json!(32);
    let errors = check(&tiny(), &parse(&json)).err().unwrap();
    // Gate, up and down of 16 experts and the shared one, in six layers and the MTP layer.
    assert_eq!(errors.len(), 3 * 17 * 7);
    assert!(errors.iter().all(|e| matches!(e, CheckpointError::Shape { .. })));
    let published = ModelConfig::from_json(crate::config::tests::PUBLISHED).unwrap();
    assert!(check(&tiny(), &published).err().unwrap().len() > 30_000);
}

#[test]
fn two_names_for_one_tensor_are_refused() {
    let mut tensors = tiny();
    let at = "model.language_model.layers.0.self_attn.";
    let copy = tensors[&format!("{at}dt_bias")].clone();
    tensors.insert(format!("{at}forget_gate.dt_bias"), copy);
    let errors = check(&tensors, &config()).err().unwrap();
    assert!(matches!(&errors[..], [CheckpointError::TwoNames { .. }]), "{errors:?}");
}

#[test]
fn an_unknown_storage_format_is_refused_before_its_tensors() {
    let mut json = config_json();
    json["quantization_config"] = json!({ "quant_method": "gptq" });
    let errors = check(&tiny(), &parse(&json)).err().unwrap();
    assert!(matches!(&errors[..], [CheckpointError::Format { .. }]), "{errors:?}");
}

#[test]
fn a_tied_head_is_the_embedding() {
    let mut json = config_json();
    json["tie_word_embeddings"] = json!(true);
    let config = parse(&json);
    let mut tensors = tiny();
    let errors = check(&tensors, &config).err().unwrap();
    assert!(matches!(&errors[..], [CheckpointError::NotTied { .. }]), "{errors:?}");
    let table = tensors["model.language_model.embed_tokens.weight"].clone();
    for stored in [Some(table.clone()), None] {
        tensors.remove("lm_head.weight");
        tensors.extend(stored.map(|head| ("lm_head.weight".to_owned(), head)));
        let resolved = check(&tensors, &config).ok().unwrap();
        assert!(resolved.tensor("lm_head.weight").unwrap().bytes == table.bytes);
        assert!(resolved.unused.is_empty());
    }
}

#[test]
fn copies_under_the_mtp_layer_are_no_news_but_strangers_are() {
    let mut tensors = tiny();
    let head = tensors["lm_head.weight"].clone();
    tensors.insert("model.language_model.layers.8.shared_head.head.weight".to_owned(), head.clone());
    tensors.insert("model.language_model.layers.8.embed_tokens.weight".to_owned(), head.clone());
    let resolved = check(&tensors, &config()).ok().unwrap();
    assert_eq!((resolved.unused.len(), resolved.warnings.len()), (2, 0));
    tensors.insert("model.language_model.layers.0.self_attn.sink".to_owned(), head);
    let resolved = check(&tensors, &config()).ok().unwrap();
    assert_eq!(
        resolved.warnings,
        ["1 stored tensors are not read, such as model.language_model.layers.0.self_attn.sink"]
    );
}

#[test]
fn the_content_id_is_of_the_content() {
    let id = |dir: &Path| Checkpoint::open(dir).unwrap().content_id().unwrap();
    let original = id(Path::new(TINY));
    assert_eq!(original.len(), 64);
    // Another spread over files and another alignment are the same content.
    let dir = single(&file(&tiny(), 5));
    assert_eq!(id(dir.path()), original);

    let changed = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = tiny();
        change(&mut tensors);
        id(single(&file(&tensors, 0)).path())
    };
    let name = "model.language_model.embed_tokens.weight";
    let length = tiny()[name].bytes.len();
    let mut ids = vec![original];
    for at in [0, (length - 256) / 2, length - 1] {
        ids.push(changed(&|tensors| tensors.get_mut(name).unwrap().bytes[at] ^= 1));
    }
    ids.push(changed(&|tensors| {
        let norm = tensors.remove("model.language_model.norm.weight").unwrap();
        tensors.insert("model.language_model.norm.weighs".to_owned(), norm);
    }));
    ids.push(changed(&|tensors| tensors.get_mut(name).unwrap().shape = vec![128, 512]));
    std::fs::write(inside(&dir, "config.json"), config_json().to_string()).unwrap();
    ids.push(id(dir.path()));
    let distinct: std::collections::BTreeSet<&String> = ids.iter().collect();
    assert_eq!(distinct.len(), ids.len());
    std::fs::remove_file(inside(&dir, "config.json")).unwrap();
    assert!(Checkpoint::open(dir.path()).unwrap().content_id().is_err());
}
