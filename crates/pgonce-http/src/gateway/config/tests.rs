//! What a file becomes, and what a mistake in it is told.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]

use super::*;
use crate::policy::{BodyPart, KeySyntax};

fn parse(text: &str) -> Result<GatewayConfig, ConfigError> {
    build::from_text(text, &Overrides::default())
}

const HEAD: &str = "[gateway]\nlisten = \"127.0.0.1:8080\"\n[gateway.upstream]\nurl = \"http://127.0.0.1:3000\"\n";

/// A file with the two lines that every one needs, and more.
fn with(more: &str) -> Result<GatewayConfig, ConfigError> {
    parse(&format!("{HEAD}{more}"))
}

/// The line of the mistake, counted after the head, and the reason.
#[track_caller]
fn mistake(more: &str) -> (usize, String) {
    let error = with(more).unwrap_err();
    (error.line.unwrap_or_else(|| panic!("no line: {error}")) - HEAD.lines().count(), error.reason)
}

#[test]
fn two_lines_are_enough() {
    let config = with("").unwrap();
    assert_eq!(config.listen.port(), 8080);
    assert_eq!(config.upstream.url, "http://127.0.0.1:3000");
    assert_eq!(config.routes.len(), 1);
    let route = config.route(&Method::POST, "/anything");
    assert_eq!((route.path.as_str(), route.policy.scope.as_str()), ("*", "http"));
    assert_eq!(route.policy.requirement, Requirement::Optional);
    assert_eq!(route.policy.in_progress, InProgress::Refuse);
    assert!(matches!(&config.tenant, TenantSource::Fixed(name) if name.is_empty()));
    assert_eq!(config.limits.tenant_inflight_max, config.limits.inflight_max, "the only tenant may take all");
    assert_eq!(config.cache.memory_bytes, 64 << 20);
    assert_eq!(config.drain_timeout, Duration::from_secs(30));
    assert_eq!(route.times, ResponseTimes { idle_max: Duration::from_secs(60), total_max: None });
    let policy = json!({
        "mode": "leased", "in_progress": "refuse", "lease": "30000ms", "retention": "86400000ms",
        "tombstone": "604800000ms", "stale": "hold", "response": "full",
    });
    assert_eq!(config.scope_policies(), [("http".to_owned(), policy)]);
}

#[test]
fn the_flags_alone_are_enough_and_win() {
    let overrides = Overrides {
        listen: "[::1]:1".parse().ok(),
        upstream: upstream_url("https://up").ok(),
        require_key: true,
        strict_keys: true,
        tenant_header: Some(HeaderName::from_static("x-tenant")),
        scope: Some("orders".to_owned()),
        stale: Some(Stale::Rerun),
        lease: Some(Duration::from_secs(7)),
        in_progress: Some(InProgress::Wait),
        cache: "redis://h".parse().ok(),
        body_bytes_max: Some(99),
    };
    let source = ConfigSource { path: None, overrides: overrides.clone() };
    let more = "[[gateway.route]]\npath = \"/off\"\nkey = \"off\"\nbody_bytes_max = 1\nlease = \"1s\"\nscope = \"s\"\n\
                [gateway.tenant]\nsource = \"fixed\"\nname = \"t\"\n[gateway.cache]\nredis = \"redis://other\"\n";
    let file = build::from_text(&format!("{HEAD}{more}"), &overrides).unwrap();
    for config in [source.load().unwrap(), file] {
        assert_eq!(config.listen.port(), 1);
        assert_eq!(config.upstream.url, "https://up");
        assert!(matches!(&config.tenant, TenantSource::Header(name) if name == "x-tenant"));
        assert_eq!(config.cache.redis.as_ref().map(|redis| redis.url.as_str()), Some("redis://h"));
        for route in &config.routes {
            assert_eq!(route.policy.requirement, Requirement::Required);
            assert_eq!(route.policy.syntax, KeySyntax::Strict);
            assert_eq!(route.policy.in_progress, InProgress::Wait);
            assert_eq!(route.policy.body_bytes_max, 99);
            assert_eq!(route.scope_policy.lease, Duration::from_secs(7));
            assert_eq!(route.scope_policy.stale, Stale::Rerun);
            let named = if route.path.as_str() == "/off" { "s" } else { "orders" };
            assert_eq!(route.policy.scope, named, "the scope of routes that name none");
        }
    }
    let probing = Overrides { stale: Some(Stale::Probe), ..overrides };
    let error = ConfigSource { path: None, overrides: probing }.load().unwrap_err();
    assert!(error.reason.contains("--stale probe"), "{error}");
}

#[test]
fn a_route_says_everything() {
    let config = with(
        r#"
[[gateway.route]]
path = "/payments/*"
scope = "payments"
methods = ["POST", "PUT"]
key = "required"
header = "X-Request-Id"
syntax = "strict"
fingerprint = { body = ["/amount", "/to"], headers = ["Content-Type"], path = false, query = false }
in_progress = "wait"
wait_max = "2s"
waiters_max = 7
body_bytes_max = "2MiB"
body_timeout = "3s"
response_bytes_max = 100
keep_headers = ["X-Receipt"]
store_client_errors = false
statuses = { in-progress = 425, conflict = 400 }
lease = "90s"
retention = "permanent"
tombstone = "none"
stale = "probe"
probe = "/payments/by-key/{key}"
attempts_max = 3
key_pattern = "^[a-z]+$"
response = "status"
"#,
    )
    .unwrap();
    let route = config.route(&Method::PUT, "/payments/1");
    let policy = &route.policy;
    assert_eq!(policy.scope, "payments");
    assert!(policy.guards(&Method::PUT) && !policy.guards(&Method::PATCH));
    assert_eq!(
        (policy.requirement, policy.syntax, policy.in_progress),
        (Requirement::Required, KeySyntax::Strict, InProgress::Wait)
    );
    assert_eq!(policy.header, "x-request-id");
    assert_eq!(policy.fingerprint.body, BodyPart::Fields(vec!["/amount".into(), "/to".into()]));
    assert_eq!(policy.fingerprint.headers, ["content-type"]);
    assert!(!policy.fingerprint.path && !policy.fingerprint.query);
    assert_eq!(
        (policy.wait_max, policy.waiters_max, policy.body_timeout),
        (Duration::from_secs(2), 7, Duration::from_secs(3))
    );
    assert_eq!((policy.body_bytes_max, policy.response_bytes_max), (2 << 20, 100));
    assert_eq!(policy.keep_headers, ["x-receipt"]);
    assert!(!policy.store_client_errors);
    assert_eq!(policy.statuses.status(&crate::Problem::Conflict), 400);
    let probe = route.scope_policy.http_probe().unwrap();
    assert_eq!(probe.url("", "payments", "k").unwrap(), "http://127.0.0.1:3000/payments/by-key/k");
    let expected = json!({
        "mode": "leased", "in_progress": "refuse", "lease": "90000ms", "retention": "permanent", "tombstone": "none",
        "stale": "hold", "response": "status", "attempts_max": 3, "key_pattern": "^[a-z]+$",
    });
    assert_eq!(config.scope_policies()[0], ("payments".to_owned(), expected), "the database cannot ask by HTTP");
    assert_eq!(config.scope_policies()[1].0, "http", "everything else");
    assert_eq!(config.route(&Method::POST, "/else").path.as_str(), "*");
}

#[test]
fn a_probe_in_sql_is_the_databases() {
    let config = with("[[gateway.route]]\npath = \"*\"\nstale = \"probe\"\nprobe = \"shop.was_paid\"\n").unwrap();
    let (_, policy) = &config.scope_policies()[0];
    assert_eq!((&policy["stale"], &policy["probe"]), (&json!("probe"), &json!("shop.was_paid")));
    assert_eq!(config.routes[0].scope_policy.http_probe(), None);
}

#[test]
fn routes_of_one_scope_share_its_rules() {
    let stated = "[[gateway.route]]\npath = \"/a\"\nlease = \"5s\"\n";
    let config = with(&format!("{stated}[[gateway.route]]\npath = \"/b\"\n")).unwrap();
    assert_eq!(config.routes.len(), 3);
    assert!(config.routes.iter().all(|route| route.scope_policy.lease == Duration::from_secs(5)));
    assert!(with(&format!("{stated}[[gateway.route]]\npath = \"/b\"\nlease = \"5000ms\"\n")).is_ok());
    let (line, reason) = mistake(&format!("{stated}[[gateway.route]]\npath = \"/b\"\nlease = \"6s\"\n"));
    assert!((4..=6).contains(&line) && reason.contains("same scope"), "{line} {reason}");
    assert!(with(&format!("{stated}[[gateway.route]]\npath = \"/b\"\nlease = \"6s\"\nscope = \"b\"\n")).is_ok());
}

#[test]
fn an_off_route_needs_no_scope_in_the_database() {
    let config = with("[[gateway.route]]\npath = \"*\"\nkey = \"off\"\n").unwrap();
    assert_eq!(config.scope_policies(), []);
}

#[test]
fn the_strictest_route_counts_for_the_method() {
    let config = with(
        "[[gateway.route]]\npath = \"/a/*\"\nkey = \"required\"\nmethods = [\"POST\"]\n\
         [[gateway.route]]\npath = \"/b/*\"\nkey = \"required\"\nmethods = [\"PUT\"]\n",
    )
    .unwrap();
    assert_eq!(config.route(&Method::PUT, "/a/../b/1").path.as_str(), "/b/*");
    assert_eq!(config.route(&Method::POST, "/b/../a/1").path.as_str(), "/a/*");
    assert_eq!(config.route(&Method::GET, "/a/1").path.as_str(), "/a/*");
    assert_eq!(config.route(&Method::POST, "").path.as_str(), "*");
}

#[test]
fn mistakes_are_told_with_their_line() {
    for (more, line, words) in [
        ("\nbogus = 1", 2, "bogus"),
        ("timeout = \"5\"", 1, "duration"),
        ("timeout = 5", 1, "expected a duration"),
        ("cert = \"c.pem\"", 1, "belong together"),
        ("[gateway.cache]\nmemory_bytes = \"1MB\"", 2, "bytes"),
        ("[gateway.cache]\nmemory_bytes = -1", 2, "bytes"),
        ("[gateway.cache]\nredis = \"http://h\"", 2, "Redis"),
        ("[gateway.cache]\nsecret = { }", 2, "env"),
        ("[gateway.cache]\nsecret = { env = \"NO_SUCH_VARIABLE\" }", 2, "NO_SUCH_VARIABLE"),
        ("[gateway.cache]\nsecret = { file = \"/no/such/file\" }", 2, "cannot be read"),
        ("[gateway.limits]\ninflight_max = 0", 2, "from 1"),
        ("[gateway.limits]\nheader_bytes_max = 10", 2, "8192"),
        ("[[gateway.route]]\nscope = \"x\"", 1, "path"),
        ("[[gateway.route]]\npath = \"orders\"", 2, "begins with /"),
        ("[[gateway.route]]\npath = \"/a\"\nscope = \"\"", 3, "scope"),
        ("[[gateway.route]]\npath = \"/a\"\nmethods = [\"POST\",\n \"post\"]", 4, "method"),
        ("[[gateway.route]]\npath = \"/a\"\nmethods = []", 3, "off"),
        ("[[gateway.route]]\npath = \"/a\"\nkey = \"must\"", 3, "expected one of `required`, `optional`, `off`"),
        ("[[gateway.route]]\npath = \"/a\"\nheader = \"a b\"", 3, "header"),
        ("[[gateway.route]]\npath = \"/a\"\nstatuses = { no-such = 400 }", 3, "no-such"),
        ("[[gateway.route]]\npath = \"/a\"\n[gateway.route.statuses]\nconflict = 200", 4, "200"),
        ("[[gateway.route]]\npath = \"/a\"\nkeep_headers = [\"ETag\", \"Set-Cookie\"]", 3, "never stored"),
        ("[[gateway.route]]\npath = \"/a\"\nfingerprint = { body = [] }", 3, "none"),
        ("[[gateway.route]]\npath = \"/a\"\nfingerprint = { body = [\"a\"] }", 3, "pointers"),
        ("[[gateway.route]]\npath = \"/a\"\nfingerprint = { bdy = \"raw\" }", 3, "bdy"),
        ("[[gateway.route]]\npath = \"/a\"\nlease = \"1ms\"", 3, "10ms"),
        ("[[gateway.route]]\npath = \"/a\"\nstale = \"probe\"", 3, "needs a probe"),
        ("[[gateway.route]]\npath = \"/a\"\nprobe = \"f\"", 3, "stale = \"probe\""),
        ("[[gateway.route]]\npath = \"/a\"\nstale = \"probe\"\nprobe = \"http://{tenant}/{key}\"", 4, "host"),
        ("[[gateway.route]]\npath = \"/a\"\nattempts_max = 2000000", 3, "1000000"),
        ("[[gateway.route]]\npath = \"/a\"\nresponse_bytes_max = \"17MiB\"", 3, "bytes"),
        ("[[gateway.route]]\npath = \"*\"\n[[gateway.route]]\npath = \"/a\"", 3, "never reached"),
        ("[[gateway.route]]\npath = \"/a\"\n[[gateway.route]]\npath = \"/a\"", 3, "never reached"),
        ("[gateway.tenant]\nsource = \"cookie\"", 2, "fixed"),
        ("[gateway.tenant]\nsource = \"header\"", 1, "needs header"),
        ("[gateway.tenant]\nsource = \"mtls\"", 1, "client_ca"),
        ("[gateway.tenant]\nsource = \"basic\"\nclaim = \"x\"", 1, "does not use claim"),
        ("[gateway.tenant]\nsource = \"jwt\"\nclaim = \"sub\"", 1, "keys"),
        ("[gateway.tenant]\nsource = \"jwt\"\nkeys = [{ algorithm = \"none\", env = \"PATH\" }]", 3, "HS256"),
        (
            "[gateway.tenant]\nsource = \"jwt\"\nclaim = \"c\"\nkeys = [{ algorithm = \"RS256\", env = \"PATH\" }]",
            4,
            "PEM",
        ),
        ("[gateway.tls]\ncert = \"x\"", 1, "key"),
        ("[gateway.regions]\nown = \"eu\"\nsecret = { env = \"PATH\" }\nregion = []", 2, "none of the regions"),
        (
            "[gateway.regions]\nown = \"eu\"\nsecret = { env = \"PATH\" }\n[[gateway.regions.region]]\nname = \"e u\"\nurl = \"http://h\"",
            4,
            "name",
        ),
        ("[gateway.seal]\ncurrent = \"a\"\nkeys = [{ id = \"a\", env = \"PATH\" }]", 3, "32 bytes"),
        ("[gateway.seal]\ncurrent = \"b\"\nkeys = []", 2, "no sealing key"),
        ("[gateway", 1, "unclosed table"),
    ] {
        let (told, reason) = mistake(more);
        assert_eq!(told, line, "{more}\n{reason}");
        assert!(reason.contains(words), "{more}\n{reason}");
    }
    let error = parse("[gateway]\nlisten = \"127.0.0.1\"\n").unwrap_err();
    assert_eq!((error.line, error.reason.contains("a port")), (Some(2), true));
    let error = parse("[gateway.upstream]\nurl = \"127.0.0.1:80\"\n").unwrap_err();
    assert_eq!((error.line, error.reason.contains("URL")), (Some(2), true));
    assert!(parse("").unwrap_err().reason.contains("--listen"));
    assert!(parse("[gateway]\nlisten = \"127.0.0.1:1\"\n").unwrap_err().reason.contains("--upstream"));
}

#[test]
fn a_mistake_never_shows_what_the_file_says() {
    for more in [
        "timeout = \"hunter2\"",
        "idle_max = \"hunter2\"",
        "idle_max = \"a\\\", expected hunter2\"",
        "http2 = \"hunter2\"",
        "ca_file = [\"hunter2\"]",
        "[gateway.cache]\nmemory_bytes = \"hunter2\"",
        "[gateway.cache]\nredis = \"hunter2\"",
        "[gateway.cache]\nredis = [\"hunter2\"]",
        "[gateway.cache]\nsecret = \"hunter2\"",
        "[gateway.cache]\nredis = \"redis://:hunter2@h",
        "[gateway.cache]\nredis = redis://:hunter2@h",
        "[[gateway.route]]\npath = \"hunter2\"",
        "[[gateway.route]]\npath = \"/a\"\nkey = \"hunter2\"",
        "[[gateway.route]]\npath = \"/a\"\nmethods = \"hunter2\"",
        "[[gateway.route]]\npath = \"/a\"\nprobe = \"http://u:hunter2@h/{key}\"\nstale = \"probe\"",
        "[[gateway.route]]\npath = \"/a\"\nstatuses = { conflict = \"hunter2\" }",
        "[gateway.tls]\ncert = \"x\"\nkey = \"y\"\nclient_ca = [\"hunter2\"]",
        "[gateway.tenant]\nsource = \"hunter2\"",
    ] {
        let error = with(more).unwrap_err();
        assert!(!error.to_string().contains("hunter2"), "{more}\n{error}");
        assert!(error.line.is_some(), "{more}\n{error}");
    }
    assert_eq!(without_value("invalid type: string \"x\", expected u16"), "invalid type: string, expected u16");
    assert_eq!(without_value("unknown variant `x`, expected `a` or `b`"), "unknown variant, expected `a` or `b`");
}

#[test]
fn the_file_is_named_and_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pgonce.toml");
    let source = ConfigSource { path: Some(path.clone()), overrides: Overrides::default() };
    assert!(source.load().unwrap_err().to_string().contains("pgonce.toml: cannot be read"));
    std::fs::write(&path, format!("database_url = \"postgres://h\"\n[up]\nport = 1\n{HEAD}")).unwrap();
    assert_eq!(source.load().unwrap().listen.port(), 8080);
    std::fs::write(&path, HEAD.replace("8080", "80801")).unwrap();
    let error = source.load().unwrap_err().to_string();
    assert!(error.ends_with("an address and a port, as 127.0.0.1:8080 or [::]:8080"), "{error}");
    assert!(error.contains("pgonce.toml, line 2: "), "{error}");
}

#[test]
fn keys_and_users_are_read_from_files() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let hex = file("hex", &"0f".repeat(32));
    let base64 = file("base64", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n");
    let pem = file("pem", "-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----\n");
    let shared = file("shared", "0123456789abcdef0123456789abcdef\n");
    let users = file("users", &format!("shop:$2y$04${}\n", ".".repeat(53)));
    let config = with(&format!(
        r#"
[gateway.seal]
current = "b"
keys = [{{ id = "a", file = "{hex}" }}, {{ id = "b", file = "{base64}" }}]
[gateway.tenant]
source = "jwt"
claim = "org"
issuer = "https://login"
keys = [{{ id = "k1", algorithm = "HS256", file = "{shared}" }}]
[gateway.regions]
own = "eu"
secret = {{ file = "{shared}" }}
region = [{{ name = "eu", url = "https://eu" }}, {{ name = "us", url = "https://us" }}]
"#
    ))
    .unwrap();
    assert!(config.seal.is_some());
    assert!(matches!(&config.tenant, TenantSource::Jwt(_)));
    assert_eq!(config.limits.tenant_inflight_max, 2048, "one of many takes a part");
    assert!(!format!("{config:?}").contains("0123456789abcdef"));
    let guessed = file("guessed", "hunter2");
    let (line, reason) = mistake(&format!("[gateway.cache]\nsecret = {{ file = \"{guessed}\" }}"));
    assert!(line == 2 && reason.contains("32 bytes"), "{reason}");
    let confused = format!("algorithm = \"HS256\", file = \"{pem}\"");
    let (line, _) = mistake(&format!("[gateway.tenant]\nsource = \"jwt\"\nclaim = \"c\"\nkeys = [{{ {confused} }}]"));
    assert_eq!(line, 4, "a public key is no secret");
    let basic = with(&format!("[gateway.tenant]\nsource = \"basic\"\nusers_file = \"{users}\"")).unwrap();
    assert!(matches!(&basic.tenant, TenantSource::Basic(_)));
    let (line, reason) = mistake(&format!("[gateway.tenant]\nsource = \"basic\"\nusers_file = \"{hex}\""));
    assert!(line == 3 && reason.contains("line 1"), "{reason}");
}

const DOCS: &str = include_str!("../../../../../docs/reference/config.md");

#[test]
fn the_documented_file_is_read() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["jwt.secret", "cache.secret", "regions.secret", "seal-2026-01", "seal-2026-02"] {
        std::fs::write(dir.path().join(name), format!("{}\n", "0f".repeat(32))).unwrap();
    }
    let example = DOCS.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let config = parse(&example.replace("/etc/pgonce", &dir.path().display().to_string())).unwrap();
    assert_eq!(config.routes.len(), 3);
    assert_eq!(config.route(&Method::POST, "/payments/7").policy.wait_max, Duration::from_secs(10));
    assert!(config.seal.is_some() && config.regions.is_some() && config.tls.is_some());
}

/// serde names what it knows when it meets what it does not know.
#[test]
fn every_key_is_documented() {
    let mut count = 0;
    for section in [
        "[gateway]",
        "[gateway.upstream]",
        "[[gateway.route]]",
        "[gateway.route.fingerprint]",
        "[gateway.tenant]",
        "[[gateway.tenant.keys]]",
        "[gateway.tls]",
        "[gateway.cache]",
        "[gateway.cache.secret]",
        "[gateway.limits]",
        "[gateway.regions]",
        "[[gateway.regions.region]]",
        "[gateway.seal]",
        "[[gateway.seal.keys]]",
    ] {
        let error = parse(&format!("{section}\nno_such_key = 1\n")).unwrap_err();
        let (_, known) = error.reason.split_once(", expected ").unwrap_or_else(|| panic!("{section}: {error}"));
        for key in known.split('`').skip(1).step_by(2) {
            let ways = [format!("`{key}`"), format!(".{key}]"), format!("{{ {key} }}")];
            assert!(ways.iter().any(|way| DOCS.contains(way)), "{section} {key}");
            count += 1;
        }
    }
    assert!(count > 70, "{count}");
}
