//! The schema is compiled in: a change of it is a change of the crate.
fn main() {
    println!("cargo::rerun-if-changed=../../sql");
}
