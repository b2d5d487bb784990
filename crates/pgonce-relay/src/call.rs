//! Calls over HTTP: sent with the provider's idempotency key, and asked about at the path that its policy names.

use std::time::Duration;

use futures_util::future::BoxFuture;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use pgonce::{CallVerdict, DoubtfulCall, Heard, OutgoingCall, Provider, Route};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, RequestBuilder, Url};
use serde_json::Value;

use crate::TargetError;
use crate::sink::webhook::{address, reason, retry_after};

/// Whose values come from the environment: nobody who may define a provider gets at anything else there.
const ENVIRONMENT: &str = "PGONCE_CALL_";
/// More of an answer is not read.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// What is kept of an answer's headers: nothing that is a secret.
const HEADERS_KEPT: [&str; 8] = [
    "content-type",
    "date",
    "idempotency-replayed",
    "idempotent-replayed",
    "location",
    "request-id",
    "retry-after",
    "x-request-id",
];

/// Providers that are reached by HTTP.
#[derive(Debug, Clone)]
pub struct HttpProvider {
    client: reqwest::Client,
    allow_private: bool,
}

impl HttpProvider {
    /// `allow_private`: also at addresses that are not public, which whoever defines a provider could otherwise reach.
    ///
    /// # Errors
    /// Where the HTTP client cannot be built.
    pub fn new(allow_private: bool) -> Result<Self, TargetError> {
        let client = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(10))
            // A redirect leads elsewhere than where the call may go; a proxy resolves names by itself.
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .dns_resolver(address::Resolver { allow_private })
            .user_agent(concat!("pgonce/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| TargetError(format!("the HTTP client cannot be built: {error}")))?;
        Ok(Self { client, allow_private })
    }

    /// A request to a path under the provider's base, with the key and the headers that are not stored.
    fn request(&self, route: &Route, method: Method, path: &str) -> Result<RequestBuilder, String> {
        let base = route.base_url.as_deref().ok_or("the provider has no base_url")?;
        let url = inside(base, path)?;
        address::check(url.as_str(), self.allow_private).map_err(|error| error.to_string())?;
        let mut headers = HeaderMap::new();
        let mut add = |name: &str, value: &str| -> Result<(), String> {
            let name = HeaderName::try_from(name).map_err(|_| "a header's name cannot be used")?;
            let value = HeaderValue::try_from(value).map_err(|_| "a header's value cannot be used")?;
            headers.insert(name, value);
            Ok(())
        };
        for (name, variable) in &route.header_env {
            if !variable.starts_with(ENVIRONMENT) {
                return Err(format!("{variable} is not a variable for headers of calls"));
            }
            let value = std::env::var(variable).map_err(|_| format!("{variable} is not set"))?;
            add(name, &value)?;
        }
        add(&route.key_header, &route.id.to_string())?;
        Ok(self.client.request(method, url).headers(headers).timeout(route.timeout))
    }

    async fn answer(request: RequestBuilder) -> Heard {
        let mut response = match request.send().await {
            Ok(response) => response,
            Err(error) if error.is_builder() => return Heard::held_back(reason(&error)),
            // Nothing was connected to, so nothing went out.
            Err(error) if error.is_connect() => return Heard::unsent(reason(&error)),
            Err(error) => return Heard::lost(reason(&error)),
        };
        let mut body = Vec::new();
        while body.len() < ANSWER_BYTES_MAX {
            match response.chunk().await {
                Ok(Some(chunk)) => body.extend_from_slice(&chunk),
                Ok(None) => break,
                // A status without its body is half an answer.
                Err(error) => return Heard::lost(format!("the answer broke off: {}", reason(&error))),
            }
        }
        body.truncate(ANSWER_BYTES_MAX);
        let status = response.status().as_u16();
        Heard::answer(status, kept(response.headers()), body).retry_after(retry_after(&response))
    }
}

impl Provider for HttpProvider {
    fn send<'a>(&'a self, call: &'a OutgoingCall) -> BoxFuture<'a, Heard> {
        Box::pin(async move {
            let Ok(method) = Method::from_bytes(call.method.as_bytes()) else {
                return Heard::held_back("the method cannot be used");
            };
            let mut request = match self.request(&call.route, method, &call.path) {
                Ok(request) => request,
                Err(why) => return Heard::held_back(why),
            };
            for (name, value) in &call.headers {
                request = request.header(name, value);
            }
            if let Some(content_type) = &call.content_type {
                request = request.header("content-type", content_type);
            }
            if let Some(body) = &call.body {
                request = request.body(body.clone());
            }
            Self::answer(request).await
        })
    }

    fn ask<'a>(&'a self, call: &'a DoubtfulCall) -> BoxFuture<'a, Heard> {
        Box::pin(async move {
            let unclear = |why: String| Heard::verdict(CallVerdict::Unclear, None).note(why);
            let path = match filled(call) {
                Ok(path) => path,
                Err(why) => return unclear(why.into()),
            };
            match self.request(&call.route, Method::GET, &path) {
                Ok(request) => Self::answer(request).await,
                Err(why) => unclear(why),
            }
        })
    }
}

/// The path to ask at, with what the call is known by.
fn filled(call: &DoubtfulCall) -> Result<String, &'static str> {
    let template = call.path.as_deref().ok_or("the provider's policy does not say where to ask")?;
    let path = template.replace("{key}", &call.route.id.to_string());
    if !path.contains("{reference}") {
        return Ok(path);
    }
    let reference = call.route.reference.as_deref().ok_or("its reference is not known")?;
    Ok(path.replace("{reference}", &utf8_percent_encode(reference, NON_ALPHANUMERIC).to_string()))
}

/// The URL, if it is under the base: the same host, and no path that climbs out. The database has checked the path; this
/// is whoever may be at the table, too.
fn inside(base: &str, path: &str) -> Result<Url, String> {
    let outside = || "the path leads out of the provider's base".to_owned();
    let home = Url::parse(base).map_err(|_| "base_url cannot be read".to_owned())?;
    if !path.starts_with('/') || path.starts_with("//") || path.contains('\\') {
        return Err(outside());
    }
    let url = Url::parse(&format!("{}{path}", base.trim_end_matches('/'))).map_err(|_| outside())?;
    let under = format!("{}/", home.path().trim_end_matches('/'));
    let is_same = url.origin() == home.origin() && url.username().is_empty() && url.password().is_none();
    if is_same && url.path().starts_with(&under) { Ok(url) } else { Err(outside()) }
}

fn kept(headers: &HeaderMap) -> Value {
    let kept = HEADERS_KEPT.iter().filter_map(|name| {
        let value = headers.get(*name)?.to_str().ok()?;
        Some(((*name).to_owned(), Value::String(value.to_owned())))
    });
    Value::Object(kept.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_under_its_base() {
        for base in ["https://bank.example/v1", "https://bank.example/v1/"] {
            assert_eq!(inside(base, "/charges?x=1").unwrap().as_str(), "https://bank.example/v1/charges?x=1");
            for outside in [
                "//evil.example/x",
                "/../admin",
                "/a/../../admin",
                "/%2e%2e/admin",
                "/\\evil",
                "@evil.example",
                "x",
                "",
            ] {
                assert!(inside(base, outside).is_err(), "{outside}");
            }
        }
        assert_eq!(inside("http://[::1]:8080", "/x").unwrap().as_str(), "http://[::1]:8080/x");
        assert!(inside("https://bank.example/v1", "/..").is_err());
    }
}
