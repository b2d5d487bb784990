//! Pooled connections that know their statements and whether the server warned about a commit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use deadpool::managed::{self, Metrics, RecycleError, RecycleResult};
use tokio::sync::OnceCell;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;
use tracing::Instrument as _;

use crate::flight;
use crate::sql::{self, Call};

pub(crate) type Pool = managed::Pool<Manager>;
pub(crate) type Pooled = managed::Object<Manager>;

/// Makes connections, and throws away those that are closed or were left in the middle of something.
#[derive(Debug)]
pub(crate) struct Manager {
    pub(crate) config: tokio_postgres::Config,
    pub(crate) tls: Connector,
    pub(crate) pgbouncer: bool,
}

#[derive(Clone)]
pub(crate) struct Connector(pub(crate) MakeRustlsConnect);

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connector")
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Shared with what was posted and is not answered yet.
    pub(crate) client: Arc<Client>,
    /// On the heap: the pool moves a connection several times each time it is had.
    statements: Box<[OnceCell<Statement>]>,
    /// Statements of the user's effects, by their text.
    cached: Mutex<HashMap<String, Statement>>,
    /// The server said WARNING: at COMMIT that means "not certain to be durable" (trap 12).
    warned: Arc<AtomicBool>,
    /// Something was begun and not ended: the connection must not go back into the pool.
    pub(crate) dirty: AtomicBool,
    pgbouncer: bool,
}

impl managed::Manager for Manager {
    type Type = Connection;
    type Error = tokio_postgres::Error;

    async fn create(&self) -> Result<Connection, tokio_postgres::Error> {
        // A pooler may not know what is prepared.
        // On the heap, or the future of everything that asks the pool would have 12 KB of room for it.
        let connected = Box::pin(flight::connect(&self.config, &self.tls.0, !self.pgbouncer)).await;
        let (client, mut connection) = connected?;
        let warned = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&warned);
        tokio::spawn(
            async move {
                while let Some(message) = std::future::poll_fn(|context| connection.poll_message(context)).await {
                    match message {
                        Ok(AsyncMessage::Notice(notice)) if notice.severity() == "WARNING" => {
                            // Seen before the answer it comes with: the flag is set when the caller looks.
                            flag.store(true, Ordering::SeqCst);
                            tracing::warn!(code = notice.code().code(), "server warning: {}", notice.message());
                        }
                        Ok(_) => {}
                        Err(error) => {
                            tracing::debug!(%error, "connection ended");
                            break;
                        }
                    }
                }
            }
            .instrument(tracing::debug_span!("pgonce.connection")),
        );
        Ok(Connection {
            client: Arc::new(client),
            statements: (0..Call::COUNT).map(|_| OnceCell::new()).collect(),
            cached: Mutex::default(),
            warned,
            dirty: AtomicBool::new(false),
            pgbouncer: self.pgbouncer,
        })
    }

    async fn recycle(&self, connection: &mut Connection, _: &Metrics) -> RecycleResult<tokio_postgres::Error> {
        if connection.client.is_closed() || connection.dirty.load(Ordering::SeqCst) {
            return Err(RecycleError::message("closed, or left in the middle of a transaction"));
        }
        Ok(())
    }
}

impl Connection {
    /// Calls one function of the protocol and returns its row: by a cached prepared statement, or, where a
    /// pooler in transaction mode is between, without leaving anything behind.
    pub(crate) async fn call(
        &self,
        call: Call,
        parameters: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Row, tokio_postgres::Error> {
        if self.pgbouncer {
            return self.client.query_typed_one(sql::text(call, true), parameters).await;
        }
        let statement = self.statement(call).await?;
        let values: Vec<&(dyn ToSql + Sync)> = parameters.iter().map(|(value, _)| *value).collect();
        self.client.query_one(statement, &values).await
    }

    /// The same for a statement that may return nothing.
    pub(crate) async fn look(
        &self,
        call: Call,
        parameters: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Option<Row>, tokio_postgres::Error> {
        if self.pgbouncer {
            return self.client.query_typed_opt(sql::text(call, true), parameters).await;
        }
        let statement = self.statement(call).await?;
        let values: Vec<&(dyn ToSql + Sync)> = parameters.iter().map(|(value, _)| *value).collect();
        self.client.query_opt(statement, &values).await
    }

    /// The same for a statement that returns any number of rows.
    pub(crate) async fn rows(
        &self,
        call: Call,
        parameters: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        if self.pgbouncer {
            return self.client.query_typed(sql::text(call, true), parameters).await;
        }
        let statement = self.statement(call).await?;
        let values: Vec<&(dyn ToSql + Sync)> = parameters.iter().map(|(value, _)| *value).collect();
        self.client.query(statement, &values).await
    }

    /// The same for a statement that returns no row: how many it touched.
    pub(crate) async fn execute(
        &self,
        call: Call,
        parameters: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<u64, tokio_postgres::Error> {
        if self.pgbouncer {
            return self.client.execute_typed(sql::text(call, true), parameters).await;
        }
        let statement = self.statement(call).await?;
        let values: Vec<&(dyn ToSql + Sync)> = parameters.iter().map(|(value, _)| *value).collect();
        self.client.execute(statement, &values).await
    }

    /// Prepares what is going to be called, so that pipelining has nothing to wait for.
    pub(crate) async fn warm(&self, call: Call) -> Result<(), tokio_postgres::Error> {
        if !self.pgbouncer {
            self.statement(call).await?;
        }
        Ok(())
    }

    /// Whether prepared statements stay: not where a pooler in transaction mode is between.
    pub(crate) fn may_prepare(&self) -> bool {
        !self.pgbouncer
    }

    /// The call's statement, for who sends it by other means.
    pub(crate) async fn prepared_call(&self, call: Call) -> Result<Statement, tokio_postgres::Error> {
        self.statement(call).await.cloned()
    }

    async fn statement(&self, call: Call) -> Result<&Statement, tokio_postgres::Error> {
        self.statements[call as usize]
            .get_or_try_init(|| self.client.prepare_typed(sql::text(call, false), sql::types(call)))
            .await
    }

    /// A statement of the user's, prepared once a connection; forgotten all together at the limit, so that
    /// texts with values in them cannot grow it without bound.
    pub(crate) async fn cached(&self, text: &str) -> Result<Statement, tokio_postgres::Error> {
        const STATEMENTS_MAX: usize = 256;
        let lock = || self.cached.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(statement) = lock().get(text) {
            return Ok(statement.clone());
        }
        let statement = self.client.prepare(text).await?;
        let mut cached = lock();
        if cached.len() >= STATEMENTS_MAX {
            cached.clear();
        }
        cached.insert(text.to_owned(), statement.clone());
        Ok(statement)
    }

    /// Forgets earlier warnings.
    pub(crate) fn expect_no_warning(&self) {
        self.warned.store(false, Ordering::SeqCst);
    }

    /// Whether the server warned since.
    pub(crate) fn warned(&self) -> bool {
        self.warned.load(Ordering::SeqCst)
    }
}
