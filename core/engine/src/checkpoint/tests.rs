use std::path::Path;

use super::Checkpoint;
use crate::config::ModelConfig;

#[test]
fn tiny() {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny"));
    let config = ModelConfig::from_dir(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let resolved = checkpoint.check(&config).unwrap();
    assert!(resolved.mtp && resolved.vision);
    assert_eq!(resolved.unused, Vec::<String>::new());
}
