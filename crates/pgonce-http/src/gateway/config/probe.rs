//! Who is asked what became of an intent whose owner vanished.

use http::Uri;

/// Who is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// A function in the database.
    Sql(String),
    /// The upstream, by GET.
    Http(UrlTemplate),
}

/// A URL with `{key}`, and maybe `{tenant}` and `{scope}`, in its path or query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UrlTemplate(String);

const NAMES: [&str; 3] = ["{key}", "{tenant}", "{scope}"];

impl UrlTemplate {
    /// Reads a template; one that begins with `/` is on the upstream.
    pub(super) fn parse(text: &str, upstream: &Uri) -> Result<Self, String> {
        let text = match text.starts_with('/') {
            true => format!("{}{text}", upstream.to_string().trim_end_matches('/')),
            false => text.to_owned(),
        };
        let after_scheme = text.split_once("://").map(|(_, rest)| rest).unwrap_or_default();
        let authority = after_scheme.split(['/', '?']).next().unwrap_or_default();
        // What a client chooses must not choose the host.
        if authority.contains(['{', '}', '@']) {
            return Err("the host of a probe is fixed: {key}, {tenant} and {scope} go into its path or query".into());
        }
        if !text.contains("{key}") {
            return Err("the URL of a probe has {key} in its path or query".into());
        }
        let filled = NAMES.iter().fold(text.clone(), |filled, name| filled.replace(name, "x"));
        let uri: Option<Uri> = filled.parse().ok();
        let is_http = uri.is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some());
        if !is_http || filled.contains(['{', '}', '#']) {
            return Err("expected a function's name, or a URL as http://orders.internal/by-key/{key}".into());
        }
        Ok(Self(text))
    }

    /// The URL for an intent. None where a value would be a dot segment, which the upstream would take for another
    /// path: then nobody can be asked.
    #[must_use]
    pub fn url(&self, tenant: &str, scope: &str, key: &str) -> Option<Uri> {
        if [tenant, scope, key].iter().any(|value| matches!(*value, "." | "..")) {
            return None;
        }
        let mut filled = String::with_capacity(self.0.len() + 64);
        let mut rest = self.0.as_str();
        // In one pass: a value that looks like a name is not filled again.
        while let Some(at) = rest.find('{') {
            filled.push_str(&rest[..at]);
            let (name, value) =
                NAMES.into_iter().zip([key, tenant, scope]).find(|(name, _)| rest[at..].starts_with(name))?;
            encode(value, &mut filled);
            rest = &rest[at + name.len()..];
        }
        filled.push_str(rest);
        filled.parse().ok()
    }
}

fn encode(value: &str, into: &mut String) {
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            into.push(char::from(byte));
        } else {
            into.push_str(&format!("%{byte:02X}"));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    fn template(text: &str) -> Result<UrlTemplate, String> {
        UrlTemplate::parse(text, &Uri::from_static("http://up:3000"))
    }

    #[test]
    fn values_stay_in_their_places() {
        let url = template("/by-key/{key}?tenant={tenant}&scope={scope}").unwrap();
        let filled = url.url("a&b", "s/1", "../x?{tenant}#é").unwrap().to_string();
        assert_eq!(filled, "http://up:3000/by-key/..%2Fx%3F%7Btenant%7D%23%C3%A9?tenant=a%26b&scope=s%2F1");
        assert_eq!(url.url("", "s", ".."), None);
        let other = template("https://h:1/{key}/x").unwrap();
        assert_eq!(other.url("", "s", "k").unwrap(), "https://h:1/k/x");
    }

    #[test]
    fn templates_that_cannot_work_are_refused() {
        let bad =
            ["", "/x", "ftp://h/{key}", "http://{tenant}/{key}", "http://{key}", "http://h{key}", "http://u:p@h/{key}"];
        for text in
            bad.into_iter().chain(["/{key}/{id}", "/{key}#x", "/{key", "x/{key}", "http:///{key}", "/a b/{key}"])
        {
            assert!(template(text).is_err(), "{text}");
        }
    }
}
