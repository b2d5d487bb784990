//! Webhooks of others: an HTTP server as a source. A sender gets its 2xx when its message has been stored or applied, and
//! not before; whatever else it gets tells it to send again, and what it sends again is known by its id.

mod verify;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

pub use verify::{Scheme, Verifier};

use super::{Delivery, Receipt, Source, SourceError};
use crate::{Message, Target, TargetError, attribute, decode};

/// Settings beside the common ones.
pub const SETTINGS: &[&str] = &["scheme", "secret_env", "tolerance", "max_body", "signature_header", "id_header"];

/// The source: `webhook://127.0.0.1:8090/stripe?scheme=stripe`.
#[derive(Debug)]
pub struct WebhookSource {
    address: SocketAddr,
    path: String,
    door: Arc<Door>,
    arrived: mpsc::Receiver<Delivery>,
    serving: Option<tokio::task::JoinHandle<()>>,
}

/// What a request passes through.
#[derive(Debug)]
struct Door {
    verifier: Verifier,
    source: String,
    body_bytes_max: usize,
    answer_within: Duration,
    arrivals: mpsc::Sender<Delivery>,
}

/// Opens it; it listens from the first `next` on.
///
/// # Errors
/// Where the address or a setting cannot be used, or there is no secret.
pub fn open(target: &Target, _: &str) -> Result<WebhookSource, TargetError> {
    let url = url::Url::parse(&target.url).map_err(|_| TargetError("the URL cannot be read".into()))?;
    let address = match (url.host_str(), url.port()) {
        (Some("localhost"), Some(port)) => Some(SocketAddr::from(([127, 0, 0, 1], port))),
        (Some(host), Some(port)) => format!("{host}:{port}").parse().ok(),
        _ => None,
    };
    let address =
        address.ok_or_else(|| TargetError("a webhook source listens at webhook://ADDRESS:PORT/path".into()))?;
    let (arrivals, arrived) = mpsc::channel(100);
    let body_bytes_max = target.number("max_body", 1..=16 << 20)?.unwrap_or(1 << 20);
    let door = Door {
        verifier: Verifier::from_target(target)?,
        source: format!("webhook:{}", target.setting("name").unwrap_or_else(|| url.path())),
        body_bytes_max: usize::try_from(body_bytes_max).unwrap_or(1 << 20),
        answer_within: target.timeout()?,
        arrivals,
    };
    Ok(WebhookSource { address, path: url.path().to_owned(), door: Arc::new(door), arrived, serving: None })
}

impl Source for WebhookSource {
    fn next(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        Box::pin(async move {
            self.reach().await?;
            let mut deliveries = Vec::new();
            self.arrived.recv_many(&mut deliveries, max.max(1)).await;
            Ok(deliveries)
        })
    }

    fn reach(&mut self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            if self.serving.is_none() {
                let listener = TcpListener::bind(self.address)
                    .await
                    .map_err(|error| SourceError(format!("{} cannot be used: {error}", self.address)))?;
                let router = Router::new().route(&self.path, post(receive)).with_state(Arc::clone(&self.door));
                self.serving = Some(tokio::spawn(async move {
                    let _ = axum::serve(listener, router).await;
                }));
            }
            Ok(())
        })
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if let Some(serving) = self.serving.take() {
                serving.abort();
            }
        })
    }
}

/// One request, from its first byte to its answer.
async fn receive(State(door): State<Arc<Door>>, request: Request<Body>) -> Response {
    let (parts, body) = request.into_parts();
    // The whole body, as it came: the signature is over these bytes, and they are what is kept.
    let Ok(body) = axum::body::to_bytes(body, door.body_bytes_max).await else {
        return (StatusCode::PAYLOAD_TOO_LARGE, "the body is too large, or broke off\n").into_response();
    };
    let id = match door.verifier.verify(&parts.headers, &body) {
        Ok(id) => id,
        Err(refusal) => {
            tracing::warn!(source = %door.source, %refusal, "a webhook was refused");
            metrics::counter!("pgonce_webhooks_refused_total", "source" => door.source.clone()).increment(1);
            return (refusal.status(), format!("{refusal}\n")).into_response();
        }
    };
    let (answer, answered) = oneshot::channel();
    let delivery = Delivery {
        message: message(id, &parts.headers, body),
        source: door.source.clone(),
        place: door.source.clone(),
        redelivered: false,
        receipt: Box::new(Waiting(answer)),
    };
    if door.arrivals.try_send(delivery).is_err() {
        return again("too many at once", 1);
    }
    match tokio::time::timeout(door.answer_within, answered).await {
        Ok(Ok(Answer::Taken)) => StatusCode::NO_CONTENT.into_response(),
        Ok(Ok(Answer::Later(delay))) => again("not now", delay.as_secs().max(1)),
        Ok(Ok(Answer::Never)) => (StatusCode::CONFLICT, "it cannot be taken, and never will be\n").into_response(),
        // Not told in time, or the consumer is gone: it may be stored, and then it is known.
        _ => again("no answer in time", 1),
    }
}

fn again(why: &'static str, seconds: u64) -> Response {
    let retry = [(header::RETRY_AFTER, seconds.to_string())];
    (StatusCode::SERVICE_UNAVAILABLE, retry, format!("{why}: send it again\n")).into_response()
}

fn message(id: String, headers: &HeaderMap, body: Bytes) -> Message {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    // Signatures and cookies are not the message's.
    let kept = ["content-type", "traceparent", "tracestate", "x-github-event", "webhook-timestamp"];
    let kind = serde_json::from_slice::<serde_json::Value>(&body).ok();
    let kind = kind.and_then(|body| body["type"].as_str().map(str::to_owned)).or_else(|| text("x-github-event"));
    // A CloudEvent's attributes, where it is one. Headers are not signed, so no tenant is taken from them; a structured event is
    // signed as a whole.
    let is_attribute = |name: &str| name.starts_with("ce-") && name != "ce-tenant";
    let attributes = headers.iter().filter(|(name, _)| is_attribute(name.as_str()));
    let attributes = attributes.map(|(name, value)| {
        let value = String::from_utf8_lossy(value.as_bytes());
        (name.to_string(), attribute::read(name.as_str(), &value))
    });
    let event = decode(text("content-type").as_deref(), attributes.collect(), body);
    Message {
        id,
        kind: if event.kind.is_empty() { kind.unwrap_or_default() } else { event.kind.clone() },
        headers: kept.iter().filter_map(|name| Some(((*name).to_owned(), text(name)?))).collect(),
        ..event
    }
}

/// What the sender gets.
#[derive(Debug)]
enum Answer {
    Taken,
    Later(Duration),
    Never,
}

/// The sender, who waits for an answer.
#[derive(Debug)]
struct Waiting(oneshot::Sender<Answer>);

impl Receipt for Waiting {
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        Box::pin(std::future::ready(self.0.send(Answer::Taken).map_err(|_| gone())))
    }

    fn retry(self: Box<Self>, delay: Duration) -> BoxFuture<'static, Result<(), SourceError>> {
        Box::pin(std::future::ready(self.0.send(Answer::Later(delay)).map_err(|_| gone())))
    }

    fn refuse(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        Box::pin(std::future::ready(self.0.send(Answer::Never).map_err(|_| gone())))
    }
}

fn gone() -> SourceError {
    SourceError("the sender did not wait for its answer; it sends again".into())
}
