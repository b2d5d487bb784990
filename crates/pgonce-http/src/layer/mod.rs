//! The tower layer: the handler's writes, the intent and the stored response in one commit.

mod body;
#[cfg(feature = "axum")]
mod extract;
mod flights;
mod guard;
mod service;

use std::fmt;
use std::sync::Arc;

use http::request::Parts;
use pgonce::{IsolationLevel, Once};
use tower_layer::Layer;

pub use body::LayerBody;
#[cfg(feature = "axum")]
pub use extract::{Failed, Leased, Transaction};
pub use service::IdempotencyService;

use crate::{Policy, Problem};
use flights::Flights;

/// Guards the requests of a service by their idempotency keys.
///
/// A guarded request's body is read whole, the intent is claimed, and the handler runs inside its transaction,
/// which it finds as a [`pgonce::Tx`] in the request's extensions (with feature `axum`: the extractor
/// `Transaction`). Then:
///
/// | response | its writes | stored, and replayed to retries |
/// |---|---|---|
/// | 2xx, 3xx | commit with it | yes |
/// | 4xx | rolled back | yes, where [`Policy::store_client_errors`] |
/// | 408, 425, 429 | rolled back | no: a retry runs again |
/// | 5xx, panic, an error of the service | rolled back | no: a retry runs again |
///
/// Nothing is sent before it is committed. A response larger than [`Policy::response_bytes_max`] is committed and
/// sent, and a retry is told that it is done and was not stored; more than 16 MiB never are.
///
/// The handler may be run several times for one request, when its transaction meets a serialization failure or
/// loses its connection; only one run's writes commit. The layer learns of it from the commit, or from a
/// [`pgonce::Failure`] in the extensions of the response, which is then no answer at all (with feature `axum`: the
/// error type `Failed` puts it there). Every handle of the transaction
/// must be gone when the response is there: a task or a streaming body that keeps one makes the request fail, with
/// nothing committed.
///
/// A duplicate of a running request is refused or waits, by [`Policy::in_progress`]; there is no status URL here, so
/// `Status` refuses. Those that wait do so in memory, without a database connection, and another payload is refused
/// as soon as the first one has its claim.
///
/// A client that goes away does not stop a handler: its retry then finds the outcome.
///
/// ```
/// # use pgonce::Once;
/// # use pgonce_http::{IdempotencyLayer, Policy, Requirement};
/// # fn example(once: Once) -> IdempotencyLayer {
/// IdempotencyLayer::new(once, Policy { requirement: Requirement::Required, ..Policy::new("create_order") })
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct IdempotencyLayer {
    rules: Rules,
}

type TenantOf = dyn Fn(&Parts) -> Result<String, Problem> + Send + Sync;

/// What a service of the layer goes by.
#[derive(Clone)]
struct Rules {
    once: Once,
    policy: Arc<Policy>,
    tenant: Option<Arc<TenantOf>>,
    leased: bool,
    isolation: Option<IsolationLevel>,
    flights: Arc<Flights>,
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules").field("policy", &self.policy).field("leased", &self.leased).finish_non_exhaustive()
    }
}

impl IdempotencyLayer {
    /// A layer whose handlers run in the intent's transaction.
    #[must_use]
    pub fn new(once: Once, policy: Policy) -> Self {
        let rules = Rules {
            once,
            policy: Arc::new(policy),
            tenant: None,
            leased: false,
            isolation: None,
            flights: Arc::default(),
        };
        Self { rules }
    }

    /// Whose a request is, by what an authentication before this layer has found out: two tenants' keys never
    /// meet. One tenant if not called.
    #[must_use]
    pub fn tenant(mut self, of: impl Fn(&Parts) -> Result<String, Problem> + Send + Sync + 'static) -> Self {
        self.rules.tenant = Some(Arc::new(of));
        self
    }

    /// For handlers that call out: the claim is a lease, renewed while the handler runs, and there is no
    /// transaction. The handler finds a [`pgonce::Lease`] in the request's extensions.
    ///
    /// A 5xx, a panic or an error of the service then says nothing about what was done outside: the scope's `stale`
    /// policy decides about a retry, at once. The response is stored after the effect, not with it.
    #[must_use]
    pub fn leased(mut self) -> Self {
        self.rules.leased = true;
        self
    }

    /// The isolation level of the transactions; the server's default if not called.
    #[must_use]
    pub fn isolation(mut self, level: IsolationLevel) -> Self {
        self.rules.isolation = Some(level);
        self
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService { inner, rules: Arc::new(self.rules.clone()) }
    }
}
