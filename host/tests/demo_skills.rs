//! What the shipped demo model can do, through the program and over HTTP: the evaluation set's own runner, on its first
//! items of every skill that has a bar.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

#[test]
fn the_first_items_of_every_skill() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let mut server = Command::new(env!("CARGO_BIN_EXE_plugfold"))
        .args(["serve", "--port", "0"])
        .current_dir(root)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    let skills = "arithmetic,copy,edit,json,tool,chain";
    let output = Command::new("python3")
        .arg(format!("{root}/tests/demo-model/eval/run.py"))
        .args(["--base-url", &format!("http://{address}/v1"), "--skills", skills, "--limit", "3"])
        .output();
    server.kill().unwrap();
    server.wait().unwrap();
    let output = output.unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(
        told.matches("| 3 | 3 |").count(),
        12,
        "each skill once as it ends and once in the table: {told}"
    );
}
