//! Signed deliveries over HTTP, as Standard Webhooks says: `webhook-id`, `webhook-timestamp`, `webhook-signature`.

pub(crate) mod address;

use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use reqwest::header::{HeaderValue, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use standardwebhooks::Webhook;

use super::{Sink, Verdict};
use crate::{Envelope, Message, Target, TargetError, attribute};

/// Settings beside the common ones.
pub const SETTINGS: &[&str] = &["secret_env", "unsigned", "allow_private", "concurrency"];

/// The longest that a receiver may put us off for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// The sink.
pub struct WebhookSink {
    client: reqwest::Client,
    url: String,
    /// The newest first: every one signs, so that a receiver may know either while it changes.
    secrets: Vec<Webhook>,
    envelope: Envelope,
    concurrency: usize,
}

impl std::fmt::Debug for WebhookSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebhookSink").field("secrets", &self.secrets.len()).finish_non_exhaustive()
    }
}

/// Opens it. Secrets come from an environment variable (`secret_env`, default PGONCE_WEBHOOK_SECRET), one or several
/// with blanks between, as `whsec_…`.
///
/// # Errors
/// Where a setting or a secret cannot be used, or the address is a private one and that is not allowed.
pub fn open(target: &Target) -> Result<WebhookSink, TargetError> {
    let allow_private = target.flag("allow_private")?;
    address::check(&target.url, allow_private)?;
    let variable = target.setting("secret_env").unwrap_or("PGONCE_WEBHOOK_SECRET");
    let texts = std::env::var(variable).unwrap_or_default();
    let secrets = texts.split_whitespace().map(Webhook::new).collect::<Result<Vec<_>, _>>();
    let secrets = secrets.map_err(|_| TargetError(format!("{variable} does not hold secrets as whsec_ and base64")))?;
    if secrets.is_empty() && !target.flag("unsigned")? {
        return Err(TargetError(format!("no secret to sign with: set {variable}, or say unsigned=true")));
    }
    let concurrency = target.setting("concurrency").map_or(Ok(16), str::parse);
    let concurrency = concurrency.ok().filter(|count| (1..=256).contains(count));
    let client = reqwest::Client::builder()
        .timeout(target.timeout()?)
        .connect_timeout(target.timeout()?)
        // A redirect leads elsewhere than where somebody allowed deliveries to go; a proxy resolves names by itself.
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .dns_resolver(address::Resolver { allow_private })
        .user_agent(concat!("pgonce/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| TargetError(format!("the HTTP client cannot be built: {error}")))?;
    Ok(WebhookSink {
        client,
        url: target.url.clone(),
        secrets,
        envelope: target.envelope()?,
        concurrency: concurrency.ok_or_else(|| TargetError("concurrency is a number from 1 to 256".into()))?,
    })
}

impl Sink for WebhookSink {
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>> {
        Box::pin(async move {
            // Boxed: the compiler cannot see through the borrow of a closure's future here.
            let calls = messages.iter().map(|message| -> BoxFuture<'_, Verdict> { Box::pin(self.deliver(message)) });
            futures_util::stream::iter(calls.collect::<Vec<_>>()).buffered(self.concurrency).collect().await
        })
    }
}

impl WebhookSink {
    async fn deliver(&self, message: &Message) -> Verdict {
        let encoded = self.envelope.encode(message, "ce-");
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let timestamp = i64::try_from(now).unwrap_or_default();
        let mut signatures = Vec::with_capacity(self.secrets.len());
        for secret in &self.secrets {
            match secret.sign(&message.id, timestamp, &encoded.body) {
                Ok(signature) => signatures.push(signature),
                Err(error) => return Verdict::Refused { reason: format!("it cannot be signed: {error}") },
            }
        }
        let mut request = self
            .client
            .post(&self.url)
            .header("content-type", encoded.content_type)
            .header("webhook-id", &message.id)
            .header("webhook-timestamp", timestamp.to_string());
        if !signatures.is_empty() {
            request = request.header("webhook-signature", signatures.join(" "));
        }
        for (name, value) in &encoded.headers {
            // Other headers go as they are, in UTF-8 where they are not ASCII.
            match HeaderValue::from_bytes(attribute::write(name, value).as_bytes()) {
                Ok(value) => request = request.header(name, value),
                Err(_) => return Verdict::Refused { reason: format!("the header {name:?} has control characters") },
            }
        }
        match request.body(encoded.body).send().await {
            Ok(response) => judge(&response),
            Err(error) if error.is_connect() => Verdict::Away { reason: reason(&error) },
            Err(error) if error.is_builder() => Verdict::Refused { reason: reason(&error) },
            // It may have arrived: the receiver knows it by its id.
            Err(error) => Verdict::Retry { reason: reason(&error), after: None },
        }
    }
}

fn judge(response: &Response) -> Verdict {
    let status = response.status();
    match status {
        _ if status.is_success() => Verdict::Delivered,
        StatusCode::GONE => Verdict::Disabled { reason: "the receiver answered 410: it wants no more".into() },
        _ => Verdict::Retry {
            reason: format!("the receiver answered {}", status.as_u16()),
            after: retry_after(response),
        },
    }
}

/// Seconds, or a date; what is neither is not there.
pub(crate) fn retry_after(response: &Response) -> Option<Duration> {
    let text = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    let wait = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::now()).unwrap_or_default(),
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

/// With its causes, without the URL: it may hold a token.
pub(crate) fn reason(error: &reqwest::Error) -> String {
    let mut causes = Vec::new();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        causes.push(cause.to_string());
        source = cause.source();
    }
    causes
        .pop()
        .unwrap_or_else(|| if error.is_timeout() { "no answer in time".into() } else { "the request failed".into() })
}
