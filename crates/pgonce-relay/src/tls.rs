//! Which cryptography TLS uses.

/// Says so for the whole process, unless somebody has: more than one is in the dependency tree, and the clients of the
/// brokers would stop rather than choose.
pub(crate) fn choose_provider() {
    // An error means that one is chosen already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
