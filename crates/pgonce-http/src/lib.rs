//! `Idempotency-Key` for HTTP services: what a retry sends again is run once, and answered with the same bytes.
//!
//! Two surfaces over one set of rules. The tower layer ([`IdempotencyLayer`]) wraps a Rust service: the handler
//! gets the open transaction, and what it writes commits with the stored response. The gateway (feature
//! `gateway`) stands before any service in any language. What counts as a key, a fingerprint, an outcome and a
//! stored response, and what each refusal looks like, is in the modules here, once, for both.

#[cfg(feature = "gateway")]
pub mod cache;
mod fingerprint;
#[cfg(feature = "gateway")]
pub mod gateway;
mod key;
mod latin1;
mod layer;
mod policy;
pub mod problem;
#[cfg(feature = "gateway")]
pub mod seal;
pub mod stored;
#[cfg(feature = "gateway")]
pub mod tenant;

pub use fingerprint::{is_pointer, request_fingerprint};
pub use key::{KEY_BYTES_MAX, KeyError, parse_key};
#[cfg(feature = "axum")]
pub use layer::{Failed, Leased, Transaction};
pub use layer::{IdempotencyLayer, IdempotencyService, LayerBody};
pub use policy::{BodyPart, FingerprintParts, InProgress, KeySyntax, Policy, Requirement};
pub use problem::{Effect, Problem, StatusMap};
pub use stored::{StoredError, StoredResponse};
