//! What pins an intent's payload: the same 32 bytes as `once.fingerprint` in SQL.

use bytes::BytesMut;
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use uuid::Uuid;

use crate::{Error, canonical};

/// What pins a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(pub [u8; 32]);

impl ToSql for Fingerprint {
    fn to_sql(&self, kind: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        self.0.as_slice().to_sql(kind, out)
    }

    fn accepts(kind: &Type) -> bool {
        <&[u8] as ToSql>::accepts(kind)
    }

    to_sql_checked!();
}

/// SHA-256 over the canonical JSON (RFC 8785) of the payload, the operation and the API version, each
/// preceded by its length as eight bytes, big-endian. Equal to `once.fingerprint(payload, operation, version)`.
///
/// # Errors
/// Where the payload cannot be written as JSON.
pub fn fingerprint<T: Serialize + ?Sized>(payload: &T, operation: &str, version: &str) -> Result<Fingerprint, Error> {
    let canonical = canonical::to_vec(payload)?;
    Ok(fingerprint_bytes(&canonical, operation, version))
}

/// The same over raw bytes. Equal to `once.fingerprint_bytes(payload, operation, version)`.
#[must_use]
pub fn fingerprint_bytes(payload: &[u8], operation: &str, version: &str) -> Fingerprint {
    let mut hash = Sha256::new();
    for part in [payload, operation.as_bytes(), version.as_bytes()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    Fingerprint(hash.finalize().into())
}

/// A UUID that names the same thing every time: for ids of resources that an intent creates, so that a
/// retry computes the id that the first attempt used. Version 5 over tenant, scope, key and part, each
/// length-prefixed.
#[must_use]
pub fn stable_uuid(tenant: &str, scope: &str, key: &str, part: &str) -> Uuid {
    // A namespace of our own, fixed for ever: changing it would change every id.
    const NAMESPACE: Uuid = Uuid::from_u128(0x6f6e_6365_7067_5000_8000_6964_656d_706f);
    let mut name = Vec::new();
    for text in [tenant, scope, key, part] {
        name.extend_from_slice(&(text.len() as u64).to_be_bytes());
        name.extend_from_slice(text.as_bytes());
    }
    Uuid::new_v5(&NAMESPACE, &name)
}

/// What logs and spans show of a key: never the key.
#[must_use]
pub fn key_hash(key: &str) -> String {
    let digest: [u8; 32] = Sha256::digest(key.as_bytes()).into();
    digest[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cannot_flow_into_each_other() {
        assert_ne!(fingerprint_bytes(b"ab", "c", ""), fingerprint_bytes(b"a", "bc", ""));
        assert_ne!(fingerprint_bytes(b"a", "b", ""), fingerprint_bytes(b"a", "", "b"));
        assert_ne!(stable_uuid("a", "b", "c", "d"), stable_uuid("ab", "", "c", "d"));
    }

    #[test]
    fn member_order_does_not_matter() {
        let one = serde_json::json!({"b": 1, "a": [1.0, 2]});
        let two: serde_json::Value = serde_json::from_str(r#"{"a":[1,2.0],"b":1e0}"#).unwrap_or_default();
        assert_eq!(fingerprint(&one, "", "").ok(), fingerprint(&two, "", "").ok());
    }
}
