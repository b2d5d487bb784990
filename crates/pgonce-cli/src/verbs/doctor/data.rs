//! What is in the tables: windows, what waits for purge, recovery or a person, and dead rows.

use serde_json::Value;
use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;

/// Counting stops here: the doctor must not be the load.
const COUNTED_MAX: i64 = 100_000;

fn counted(count: i64) -> String {
    if count > COUNTED_MAX { format!("more than {COUNTED_MAX}") } else { count.to_string() }
}

const SCOPES: &str = "
SELECT jsonb_build_object('scope', coalesce(w.scope, '(default)'), 'mode', w.mode, 'retention', w.retention,
    'tombstone', w.tombstone, 'lease', w.lease, 'under_lease', w.window < w.lease, 'under_minute', w.window < interval '1 minute')
FROM (SELECT s.*, CASE WHEN s.retention NOT IN ('permanent', 'none') THEN s.retention::interval END AS window
      FROM once.scopes s) w ORDER BY w.scope";

/// Windows against leases, and what happens after them.
pub async fn retention(client: &Client) -> Findings {
    let scopes = database::json_rows(client, SCOPES, &[]).await?;
    let mut findings = Vec::new();
    for scope in &scopes {
        let leased = scope["mode"] == "leased";
        let field = |name: &str| scope[name].as_str().unwrap_or_default();
        let described = format!("scope {}: retention {}, lease {}", field("scope"), field("retention"), field("lease"));
        if scope["under_lease"] == true {
            findings.push(Finding::new(
                if leased { Level::Fail } else { Level::Warn },
                "retention",
                described,
                "An outcome is forgotten sooner than a slow attempt gives up: its retry runs again.",
                "once.define_scope with a retention of at least the longest time in which a client still retries.",
            ));
        } else if leased && scope["under_minute"] == true {
            findings.push(Finding::new(
                Level::Warn,
                "retention",
                described,
                "Clients and brokers retry for minutes and hours; after the window a retry runs again.",
                "once.define_scope with a retention of at least the longest time in which a client still retries.",
            ));
        }
    }
    if findings.is_empty() {
        findings.push(Finding::ok("retention", format!("{} rules: no window is shorter than its lease", scopes.len())));
    }
    let ends = |scope: &&Value| scope["retention"] != "permanent" && scope["tombstone"] == "none";
    let bare = scopes.iter().filter(ends).count();
    if bare > 0 {
        findings.push(Finding::new(
            Level::Info,
            "tombstone",
            format!("{bare} of {} rules have a window and no tombstone", scopes.len()),
            "A retry after the window runs again. A tombstone answers \"done, result expired\" in its place.",
            "Where a late retry must not run: define_scope with tombstone, for example \"90d\" or \"permanent\".",
        ));
    }
    Ok(findings)
}

const EXPIRED: &str = "
SELECT jsonb_build_object('count', count(*), 'hours', extract(epoch FROM once.clock() - min(e.expires_at)) / 3600,
    'oldest', min(e.expires_at))
FROM (SELECT i.expires_at FROM once.intents i WHERE i.expires_at <= once.clock()
      ORDER BY i.expires_at LIMIT 100001) e";

/// Rows past their window: harmless to answers, not to the disk.
pub async fn waiting_for_purge(client: &Client) -> Findings {
    let waiting = database::json_row(client, EXPIRED, &[]).await?;
    let count = waiting["count"].as_i64().unwrap_or(0);
    let hours = waiting["hours"].as_f64().unwrap_or(0.0);
    let oldest = crate::output::text("oldest_at", &waiting["oldest"]);
    let level = match count {
        0 => return Ok(vec![Finding::ok("purge", "nothing waits for purge")]),
        _ if hours >= 24.0 || count > COUNTED_MAX => Level::Fail,
        _ if hours >= 1.0 => Level::Warn,
        _ => {
            return Ok(vec![Finding::ok(
                "purge",
                format!("{} expired rows wait for purge, none for long", counted(count)),
            )]);
        }
    };
    Ok(vec![Finding::new(
        level,
        "purge",
        format!("{} expired rows wait for purge, the oldest since {oldest}", counted(count)),
        "They answer like purged ones, but the table grows without bound: nobody seems to purge.",
        "Schedule `pgonce purge` every few minutes.",
    )])
}

const STALE: &str = "
SELECT jsonb_build_object('count', count(*), 'minutes', extract(epoch FROM max(s.overdue)) / 60)
FROM (SELECT v.overdue FROM once.stale_claims v LIMIT 100001) s";

/// Leases that are over and that nobody has sorted.
pub async fn stale(client: &Client) -> Findings {
    let stale = database::json_row(client, STALE, &[]).await?;
    let (count, minutes) = (stale["count"].as_i64().unwrap_or(0), stale["minutes"].as_f64().unwrap_or(0.0));
    Ok(vec![if count == 0 || minutes < 1.0 {
        Finding::ok("stale", "no claim is long past its lease")
    } else {
        Finding::new(
            Level::Warn,
            "stale",
            format!("{} claims are past their lease, one for {minutes:.0} minutes", counted(count)),
            "Nobody knows what became of them until policy has sorted them; a retry of the same key does it too.",
            "pgonce intents recover (schedule it: --watch 30s).",
        )
    }])
}

const UNCERTAIN: &str = "
SELECT jsonb_build_object('count', count(*), 'hours', extract(epoch FROM max(u.since)) / 3600)
FROM (SELECT v.since FROM once.uncertain v LIMIT 100001) u";

/// Intents that wait for a person.
pub async fn uncertain(client: &Client) -> Findings {
    let uncertain = database::json_row(client, UNCERTAIN, &[]).await?;
    let (count, hours) = (uncertain["count"].as_i64().unwrap_or(0), uncertain["hours"].as_f64().unwrap_or(0.0));
    Ok(vec![if count == 0 {
        Finding::ok("uncertain", "no intent is uncertain")
    } else {
        Finding::new(
            Level::Warn,
            "uncertain",
            format!("{} intents are uncertain, one for {hours:.1} hours", counted(count)),
            "Their effects may or may not be there; every retry is refused until somebody decides.",
            "pgonce intents list --uncertain, look at the business state, then pgonce intents settle.",
        )
    }])
}

const DEAD: &str = "
SELECT jsonb_build_object('dead', coalesce(s.dead_rows, 0), 'rows', s.rows_estimated,
    'vacuumed', coalesce(to_char(s.last_autovacuum, 'YYYY-MM-DD HH24:MI'), 'never'))
FROM once.sizes s WHERE s.relation = 'intent'";

/// Dead rows of the intent table.
pub async fn bloat(client: &Client) -> Findings {
    let sizes = database::json_row(client, DEAD, &[]).await?;
    let (dead, rows) = (sizes["dead"].as_i64().unwrap_or(0), sizes["rows"].as_i64().unwrap_or(0));
    Ok(vec![if dead <= 10_000 + rows / 5 {
        Finding::ok("bloat", format!("once.intent: about {rows} rows, {dead} dead"))
    } else {
        Finding::new(
            Level::Warn,
            "bloat",
            format!(
                "once.intent: {dead} dead rows to {rows} live ones, last autovacuum {}",
                sizes["vacuumed"].as_str().unwrap_or("never")
            ),
            "Claims read past dead rows, and the table grows beyond its content.",
            "Look for a long-running transaction or a stale replication slot that holds vacuum back; then VACUUM once.intent.",
        )
    }])
}
