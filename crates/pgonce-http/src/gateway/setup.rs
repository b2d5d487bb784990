//! What the configuration describes, made.

use super::config::{SealConfig, TenantConfig};
use crate::seal::{Keyring, SealKey};
use crate::tenant::TenantSource;

/// Who says whose request it is.
pub(super) fn tenant_source(config: &TenantConfig) -> Result<TenantSource, String> {
    match config {
        TenantConfig::Fixed(tenant) => TenantSource::fixed(tenant.clone()).map_err(|error| error.to_string()),
        TenantConfig::Header(name) => Ok(TenantSource::Header(name.clone())),
        _ => Err("not yet".into()),
    }
}

/// The keys that stored bodies are sealed with.
pub(super) fn keyring(config: &SealConfig) -> Result<Keyring, String> {
    let mut keys = Vec::with_capacity(config.keys.len());
    for key in &config.keys {
        let text = std::str::from_utf8(key.key.expose()).unwrap_or_default();
        let parsed = SealKey::parse(text).map_err(|error| format!("key {}: {error}", key.id))?;
        keys.push((key.id.clone(), parsed));
    }
    Keyring::new(config.current.clone(), keys).map_err(|error| error.to_string())
}
