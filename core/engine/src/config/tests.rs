use super::ModelConfig;

#[test]
fn tiny() {
    let dir = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny"));
    let config = ModelConfig::from_dir(dir).unwrap();
    assert_eq!(config.layers.len(), 8);
}
