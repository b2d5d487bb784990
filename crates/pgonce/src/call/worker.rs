//! The worker: sends what is requested, asks about what is unknown, records what it hears under its fence.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use tracing::Instrument as _;

use super::provider::{DoubtfulCall, Heard, OutgoingCall, Provider, Route};
use crate::claim::interval;
use crate::sql::Call;
use crate::{Error, Once, observe};

/// Sends calls and learns what became of them. Any number may run; a call is one worker's at a time, and what it says is
/// taken only while it is.
#[derive(Debug, Clone)]
#[must_use = "a worker does nothing until it is run"]
pub struct CallWorker<'a> {
    once: &'a Once,
    http: Arc<dyn Provider>,
    own: HashMap<String, Arc<dyn Provider>>,
    name: String,
    provider: Option<String>,
    at_once: usize,
    poll: Duration,
    sends: bool,
    asks: bool,
}

/// How often what is under way is counted, for the gauges.
const COUNT_EVERY: Duration = Duration::from_secs(5);
/// How many vanished senders and early notices are looked after at a time.
const RECOVER_MAX: i32 = 100;
/// A pause for a provider that says 429 and not for how long.
const PAUSE_DEFAULT: Duration = Duration::from_secs(1);

/// Something to do, under way.
type Work<'w> = BoxFuture<'w, ()>;

impl<'a> CallWorker<'a> {
    /// A worker that reaches providers with a `base_url` by `http`.
    pub fn new(once: &'a Once, http: Arc<dyn Provider>) -> Self {
        Self {
            once,
            http,
            own: HashMap::new(),
            name: format!("worker {}", std::process::id()),
            provider: None,
            at_once: 16,
            poll: Duration::from_millis(200),
            sends: true,
            asks: true,
        }
    }

    /// Code of the caller's own for a provider, in place of HTTP.
    pub fn serve(mut self, provider: impl Into<String>, by: Arc<dyn Provider>) -> Self {
        self.own.insert(provider.into(), by);
        self
    }

    /// What operators see as the holder of a call.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Only calls of this provider.
    pub fn only(mut self, provider: impl Into<String>) -> Self {
        self.provider = Some(provider.into());
        self
    }

    /// How many requests are under way at once: 16 if not called, at most 1000.
    pub fn at_once(mut self, requests: usize) -> Self {
        self.at_once = requests.clamp(1, 1000);
        self
    }

    /// How long to wait before looking again when there is nothing to do: 200 ms if not called.
    pub fn poll(mut self, pause: Duration) -> Self {
        self.poll = pause;
        self
    }

    /// Sends, and leaves unknown calls to others.
    pub fn send_only(mut self) -> Self {
        self.asks = false;
        self
    }

    /// Asks about unknown calls, and leaves sending to others.
    pub fn reconcile_only(mut self) -> Self {
        self.sends = false;
        self
    }

    /// Works until `stop` resolves, then finishes what it holds. A database that is away is waited for.
    pub async fn run_until(&self, stop: impl Future<Output = ()>) {
        let mut stop = pin!(stop);
        let mut stopping = false;
        let mut running = FuturesUnordered::new();
        let mut counted: Option<Instant> = None;
        while !stopping || !running.is_empty() {
            let free = if stopping { 0 } else { self.at_once - running.len() };
            let taken = if free > 0 { beside(&mut running, self.work_or_wait(free)).await } else { Vec::new() };
            running.extend(taken);
            if counted.is_none_or(|counted| counted.elapsed() >= COUNT_EVERY) {
                counted = Some(Instant::now());
                let _ = beside(&mut running, self.open()).await;
            }
            tokio::select! {
                Some(()) = running.next() => {}
                () = &mut stop, if !stopping => stopping = true,
                // Also while there is work: it may have ended beside the counting, with nothing left to wait for.
                () = tokio::time::sleep(self.poll), if !stopping => {}
                else => {}
            }
        }
    }

    /// Works until nothing is requested, sent or unknown any more, or `limit` is over, and returns how many are left.
    /// Calls that are escalated are not counted: they wait for a person.
    ///
    /// # Errors
    /// What the database says.
    pub async fn run_until_settled(&self, limit: Duration, stop: impl Future<Output = ()>) -> Result<i64, Error> {
        let done = async {
            let deadline = Instant::now() + limit;
            while Instant::now() < deadline && !matches!(self.open().await, Ok(0)) {
                tokio::time::sleep(self.poll).await;
            }
        };
        let mut stop = pin!(stop);
        let ended = async {
            tokio::select! {
                () = done => {}
                () = &mut stop => {}
            }
        };
        self.run_until(ended).await;
        self.open().await
    }

    /// How many calls are not settled, and the gauges.
    async fn open(&self) -> Result<i64, Error> {
        let connection = self.once.connection().await?;
        let rows = connection.rows(Call::ProviderOpen, &[(&self.provider, Type::TEXT)]).await?;
        let mut found: HashMap<(String, &'static str), i64> = HashMap::new();
        for row in rows {
            let (provider, state, calls): (String, String, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            for known in ["requested", "sent", "unknown", "escalated"] {
                // What is not there any more is none, not what it was.
                let count = found.entry((provider.clone(), known)).or_default();
                *count += if known == state { calls } else { 0 };
            }
        }
        let mut open = 0;
        for ((provider, state), calls) in found {
            observe::calls_open(&provider, state, calls);
            open += if state == "escalated" { 0 } else { calls };
        }
        Ok(open)
    }

    async fn work_or_wait(&self, free: usize) -> Vec<Work<'_>> {
        self.take(free).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "calls cannot be taken; trying again");
            Vec::new()
        })
    }

    /// What there is to do, taken and committed: from here on a call counts as sent.
    async fn take(&self, free: usize) -> Result<Vec<Work<'_>>, Error> {
        let connection = self.once.connection().await?;
        let mut taken: Vec<Work<'_>> = Vec::new();
        if self.asks {
            connection.call(Call::ProviderRecover, &[(&RECOVER_MAX, Type::INT4)]).await?;
            connection.call(Call::ProviderSweep, &[(&RECOVER_MAX, Type::INT4)]).await?;
            let began = Instant::now();
            // Half of the hands at most: a provider that answers nothing must not keep others from being called.
            let share = if self.sends { free.div_ceil(2) } else { free };
            for row in self.rows(&connection, Call::ProviderDoubts, share).await? {
                let call = DoubtfulCall::read(&row)?;
                taken.push(Box::pin(self.ask(call, began)));
            }
        }
        if self.sends && free > taken.len() {
            let began = Instant::now();
            for row in self.rows(&connection, Call::ProviderTake, free - taken.len()).await? {
                let call = OutgoingCall::read(&row)?;
                taken.push(Box::pin(self.send(call, began)));
            }
        }
        Ok(taken)
    }

    async fn rows(&self, connection: &crate::pool::Connection, call: Call, limit: usize) -> Result<Vec<Row>, Error> {
        let limit = i32::try_from(limit).unwrap_or(1000);
        let own: Vec<&String> = self.own.keys().collect();
        let parameters: [(&(dyn ToSql + Sync), Type); 4] =
            [(&self.name, Type::TEXT), (&limit, Type::INT4), (&self.provider, Type::TEXT), (&own, Type::TEXT_ARRAY)];
        Ok(connection.rows(call, &parameters).await?)
    }

    fn provider(&self, route: &Route) -> &dyn Provider {
        self.own.get(&route.provider).unwrap_or(&self.http).as_ref()
    }

    async fn send(&self, call: OutgoingCall, taken: Instant) {
        let span = span("send", &call.route, call.attempt);
        async {
            fail::fail_point!("call::before_send");
            // Whoever slept through its lease must not begin: the call may be somebody else's by now.
            let heard = if taken.elapsed() >= call.route.grace {
                Heard::held_back("it was taken too long ago")
            } else {
                self.provider(&call.route).send(&call).await
            };
            fail::fail_point!("call::after_send");
            self.record(Call::ProviderAnswered, "send", &call.route, heard, taken).await;
        }
        .instrument(span)
        .await;
    }

    async fn ask(&self, call: DoubtfulCall, taken: Instant) {
        let span = span("ask", &call.route, call.asked);
        async {
            if call.how == "sql" {
                let asked = self.ask_sql(&call.route).await;
                self.told("ask", &call.route, asked, taken);
                return;
            }
            let heard = self.provider(&call.route).ask(&call).await;
            fail::fail_point!("call::after_ask");
            self.record(Call::ProviderAsked, "ask", &call.route, heard, taken).await;
        }
        .instrument(span)
        .await;
    }

    async fn ask_sql(&self, route: &Route) -> Result<String, Error> {
        let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&route.id, Type::UUID), (&route.claim_id, Type::UUID)];
        Ok(self.once.connection().await?.call(Call::ProviderAskSql, &parameters).await?.try_get(0)?)
    }

    /// What was heard, into the database; again while the lease lasts where the database is away. If it never gets there,
    /// the call is unknown when its lease ends, and the provider is asked.
    async fn record(&self, call: Call, step: &'static str, route: &Route, heard: Heard, taken: Instant) {
        let lease = route.timeout + route.grace;
        let mut pause = Duration::from_millis(10);
        let recorded = loop {
            match self.record_once(call, route, &heard).await {
                Err(error) if error.is_retryable() && taken.elapsed() + pause < lease => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                other => break other,
            }
        };
        self.told(step, route, recorded, taken);
        if let Err(error) = self.tell_breaker(route, &heard).await {
            tracing::debug!(%error, "the breaker was not told");
        }
    }

    async fn record_once(&self, call: Call, route: &Route, heard: &Heard) -> Result<String, Error> {
        let delay = heard.retry_after.map(interval);
        let parameters: [(&(dyn ToSql + Sync), Type); 10] = [
            (&route.id, Type::UUID),
            (&route.claim_id, Type::UUID),
            (&heard.outcome, Type::TEXT),
            (&heard.code, Type::INT4),
            (&heard.headers, Type::JSONB),
            (&heard.body, Type::BYTEA),
            (&heard.note, Type::TEXT),
            (&delay, Type::TEXT),
            (&heard.verdict, Type::TEXT),
            (&heard.reference, Type::TEXT),
        ];
        Ok(self.once.connection().await?.call(call, &parameters).await?.try_get(0)?)
    }

    async fn tell_breaker(&self, route: &Route, heard: &Heard) -> Result<(), Error> {
        let pause = heard.retry_after.or_else(|| (heard.code == Some(429)).then_some(PAUSE_DEFAULT)).map(interval);
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&route.provider, Type::TEXT), (&heard.provider_failed, Type::BOOL), (&pause, Type::TEXT)];
        self.once.connection().await?.call(Call::ProviderHeard, &parameters).await?;
        Ok(())
    }

    fn told(&self, step: &'static str, route: &Route, recorded: Result<String, Error>, taken: Instant) {
        let (provider, id) = (&route.provider, route.id);
        match recorded {
            Ok(state) => {
                if state == "escalated" {
                    tracing::error!(%provider, call = %id, "a call needs a person: pgonce calls show");
                }
                observe::called(provider, step, &state, taken.elapsed());
            }
            Err(error) => {
                observe::called(provider, step, "lost", taken.elapsed());
                tracing::warn!(%provider, call = %id, %error, "not recorded; the provider is asked when the lease is over");
            }
        }
    }
}

/// Waits for something while the work goes on. Without that, work which has a connection would keep it from whoever waits
/// for one here.
async fn beside<T>(running: &mut FuturesUnordered<Work<'_>>, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        tokio::select! {
            done = &mut future => return done,
            Some(()) = running.next() => {}
        }
    }
}

fn span(step: &'static str, route: &Route, attempt: i32) -> tracing::Span {
    tracing::info_span!("pgonce.call", step, provider = %route.provider, operation = %route.operation, call = %route.id,
        retry_attempt_count = attempt)
}
