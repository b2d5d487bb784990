//! What a proxy must take out of a message and put into it.

use std::net::SocketAddr;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Request, Version};

/// The upstream learns these from the gateway only: what a client sends under these names is dropped.
pub(crate) const CLAIM: HeaderName = HeaderName::from_static("pgonce-claim");
pub(crate) const KEY: HeaderName = HeaderName::from_static("pgonce-key");
pub(crate) const SCOPE: HeaderName = HeaderName::from_static("pgonce-scope");
pub(crate) const TENANT: HeaderName = HeaderName::from_static("pgonce-tenant");

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED: HeaderName = HeaderName::from_static("forwarded");

/// Beside what `Connection` names (RFC 9110, 7.6.1). `Trailer` is not among them: it tells what a trailer section
/// holds, and that is passed on.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Takes out what belongs to one connection only. A length beside an encoding of the transfer is none: it would frame
/// what follows wrongly (RFC 9112, 6.3).
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(header::CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

/// Whether whoever sends these takes trailers.
pub(crate) fn takes_trailers(headers: &HeaderMap) -> bool {
    let listed = headers.get_all(header::TE).iter().filter_map(|value| value.to_str().ok());
    listed.flat_map(|value| value.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

/// What only this gateway says to the upstream, about the request and about who sent it.
const OURS: [HeaderName; 5] = [CLAIM, KEY, SCOPE, TENANT, super::regions::HOP];
const ABOUT_THE_CLIENT: [HeaderName; 4] = [X_FORWARDED_FOR, X_FORWARDED_PROTO, X_FORWARDED_HOST, FORWARDED];

/// What else must not be said in another spelling.
const OTHERS: [&str; 3] = ["idempotency-key", "content-length", "content-type"];

/// Takes out of a request what only this gateway says, however it is spelled.
pub(crate) fn strip_ours(headers: &mut HeaderMap) {
    for name in &OURS {
        headers.remove(name);
    }
    strip_underscored(headers);
}

/// CGI, WSGI and their like call `Pgonce-Tenant` and `Pgonce_Tenant` alike HTTP_PGONCE_TENANT: to such a service the
/// second is the first. Taken out is each such spelling of a name that is ours, that frames the message, or that the
/// request has in its own spelling too.
fn strip_underscored(headers: &mut HeaderMap) {
    if !headers.keys().any(|name| name.as_str().contains('_')) {
        return;
    }
    let is_forged = |name: &&HeaderName| {
        let dashed = name.as_str().replace('_', "-");
        let is = |known: &HeaderName| known.as_str() == dashed;
        name.as_str().contains('_')
            && (headers.contains_key(dashed.as_str())
                || OURS.iter().chain(&ABOUT_THE_CLIENT).chain(&HOP_BY_HOP).any(is)
                || OTHERS.contains(&dashed.as_str()))
    };
    let forged: Vec<HeaderName> = headers.keys().filter(is_forged).cloned().collect();
    for name in forged {
        headers.remove(name);
    }
}

/// Takes out of a trailer section what could pass for a header that only this gateway sets.
pub(crate) fn clean_trailers(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers);
    strip_ours(trailers);
    for name in &ABOUT_THE_CLIENT {
        trailers.remove(name);
    }
}

/// The protocol that a request wants to upgrade to, if it may.
pub(crate) fn wants_upgrade<B>(request: &Request<B>) -> Option<HeaderValue> {
    let asks = request.headers().get_all(header::CONNECTION).iter().any(|value| {
        value.to_str().is_ok_and(|value| value.split(',').any(|name| name.trim().eq_ignore_ascii_case("upgrade")))
    });
    let upgrade = request.headers().get(header::UPGRADE)?;
    (asks && request.version() == Version::HTTP_11).then(|| upgrade.clone())
}

/// Who the request came from, as the upstream is told. Where the peer is trusted, its own word is kept and
/// added to; else it is dropped.
pub(crate) fn forwarded(headers: &mut HeaderMap, peer: SocketAddr, tls: bool, host: Option<&HeaderValue>, trust: bool) {
    let proto = if tls { "https" } else { "http" };
    let ip = peer.ip().to_canonical();
    if !trust {
        for name in &ABOUT_THE_CLIENT {
            headers.remove(name);
        }
    }
    let address = ip.to_string();
    append_listed(headers, X_FORWARDED_FOR, &address);
    if !headers.contains_key(X_FORWARDED_PROTO) {
        headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static(proto));
    }
    if let (Some(host), false) = (host, headers.contains_key(X_FORWARDED_HOST)) {
        headers.insert(X_FORWARDED_HOST, host.clone());
    }
    let (open, close) = if ip.is_ipv6() { ("\"[", "]\"") } else { ("", "") };
    // A quoted string holds any host; quotes and backslashes are in none.
    let host = host.and_then(|host| host.to_str().ok()).filter(|host| !host.contains(['"', '\\']));
    let element = match host {
        Some(host) => ["for=", open, &address, close, ";proto=", proto, ";host=\"", host, "\""].concat(),
        None => ["for=", open, &address, close, ";proto=", proto].concat(),
    };
    append_listed(headers, FORWARDED, &element);
}

/// Adds an element to a list header, in one line.
fn append_listed(headers: &mut HeaderMap, name: HeaderName, element: &str) {
    let value = if headers.contains_key(&name) {
        let mut lines: Vec<&str> = headers.get_all(&name).iter().filter_map(|value| value.to_str().ok()).collect();
        lines.push(element);
        HeaderValue::from_str(&lines.join(", "))
    } else {
        HeaderValue::from_str(element)
    };
    if let Ok(value) = value {
        headers.insert(name, value);
    }
}

/// HTTP/2 may split cookies into several lines; HTTP/1.1 wants one (RFC 9113, 8.2.3).
pub(crate) fn join_cookies(headers: &mut HeaderMap) {
    let lines: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if lines.len() > 1
        && let Ok(value) = HeaderValue::from_bytes(&lines.join(&b"; "[..]))
    {
        headers.insert(header::COOKIE, value);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn what_connection_names_goes_too() {
        let mut headers = map(&[
            ("connection", "close, X-Private"),
            ("connection", "keep-alive"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("x-public", "2"),
        ]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers, map(&[("x-public", "2")]));
    }

    #[test]
    fn a_length_beside_an_encoding_goes() {
        let mut headers = map(&[("content-length", "5"), ("transfer-encoding", "chunked"), ("x-public", "2")]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers, map(&[("x-public", "2")]));
        let mut headers = map(&[("content-length", "5")]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers, map(&[("content-length", "5")]));
    }

    #[test]
    fn another_spelling_of_ours_goes_too() {
        let mut headers = map(&[
            ("x_forwarded_for", "forged"),
            ("transfer_encoding", "chunked"),
            ("idempotency_key", "forged"),
            ("x-tenant", "acme"),
            ("x_tenant", "rival"),
            ("x_public", "1"),
        ]);
        for name in OURS {
            let underscored = name.as_str().replacen('-', "_", 1).parse::<HeaderName>().unwrap();
            headers.insert(underscored, HeaderValue::from_static("forged"));
            headers.insert(name, HeaderValue::from_static("forged"));
        }
        strip_ours(&mut headers);
        assert_eq!(headers, map(&[("x-tenant", "acme"), ("x_public", "1")]));
    }

    #[test]
    fn an_untrusted_peer_cannot_say_who_it_is() {
        let peer = "192.0.2.7:1234".parse().unwrap();
        let mut headers = map(&[("x-forwarded-for", "10.0.0.1"), ("forwarded", "for=10.0.0.1")]);
        let host = HeaderValue::from_static("shop.example");
        forwarded(&mut headers, peer, true, Some(&host), false);
        assert_eq!(headers[X_FORWARDED_FOR], "192.0.2.7");
        assert_eq!(headers[FORWARDED], "for=192.0.2.7;proto=https;host=\"shop.example\"");
        assert_eq!(headers[X_FORWARDED_PROTO], "https");
        forwarded(&mut headers, "[2001:db8::1]:1".parse().unwrap(), false, None, true);
        assert_eq!(headers[X_FORWARDED_FOR], "192.0.2.7, 2001:db8::1");
        assert!(headers[FORWARDED].to_str().unwrap().ends_with(", for=\"[2001:db8::1]\";proto=http"));
        assert_eq!(headers[X_FORWARDED_PROTO], "https");
    }

    #[test]
    fn an_upgrade_needs_both_headers() {
        let request = |lines: &[(&'static str, &'static str)]| {
            let mut request = Request::new(());
            *request.headers_mut() = map(lines);
            request
        };
        assert!(wants_upgrade(&request(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")])).is_some());
        assert!(wants_upgrade(&request(&[("upgrade", "websocket")])).is_none());
        assert!(wants_upgrade(&request(&[("connection", "upgrade")])).is_none());
    }

    #[test]
    fn cookies_become_one_line() {
        let mut headers = map(&[("cookie", "a=1"), ("cookie", "b=2")]);
        join_cookies(&mut headers);
        assert_eq!(headers.get_all(header::COOKIE).iter().collect::<Vec<_>>(), ["a=1; b=2"]);
    }
}
