//! Asking the service itself what became of a request, where a route names a URL for it.

use http::StatusCode;
use http_body_util::{BodyExt as _, Limited};
use pgonce::Answer;

use super::Gateway;
use super::config::UrlTemplate;
use super::guard::Guarded;

/// Who settles by a probe, in the audit trail.
const ACTOR: &str = "gateway probe";

impl Gateway {
    /// Asks the probe's URL about an intent that is uncertain, and settles it by the answer: 2xx means that the
    /// effect is there, and its body is the response; 404 and 410 that it is not, and may run. Anything else
    /// says nothing, and the intent stays uncertain. Whether it was settled.
    pub(crate) async fn probe(&self, guarded: &Guarded) -> bool {
        let Some(template) = guarded.route.scope_policy.http_probe() else { return false };
        let settled = self.ask(guarded, template).await;
        metrics::counter!("pgonce_probes_total", "scope" => guarded.name.scope.clone(),
            "result" => if settled.is_some() { "settled" } else { "unknown" })
        .increment(1);
        let Some((verdict, answer)) = settled else { return false };
        let reason = format!("the probe's URL answered {}", answer.code.unwrap_or_default());
        let answer = if verdict == "succeeded" { answer } else { Answer::default() };
        match self.batcher.settle(&guarded.name, verdict, ACTOR, &reason, answer).await {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "what the probe found could not be recorded");
                false
            }
        }
    }

    async fn ask(&self, guarded: &Guarded, template: &UrlTemplate) -> Option<(&'static str, Answer)> {
        let name = &guarded.name;
        let url = template.url(&name.tenant, &name.scope, &name.key)?;
        let response = guarded.live.upstream.fetch(url).await.ok()?;
        let (head, body) = response.map(|body| body.within(guarded.route.times)).into_parts();
        match head.status {
            StatusCode::NOT_FOUND | StatusCode::GONE => {
                Some(("retry", Answer { code: Some(head.status.as_u16().into()), ..Answer::default() }))
            }
            status if status.is_success() => {
                let limit = guarded.policy().response_bytes_max;
                let body = Limited::new(body, limit).collect().await.ok().map(|body| body.to_bytes());
                Some(("succeeded", guarded.to_store(&head, body).ok()?))
            }
            _ => None,
        }
    }
}

/// Percent-encoded but for what is unreserved in a URL (RFC 3986, 2.3).
pub(crate) fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}
