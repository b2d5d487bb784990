-- What operators ask about calls. Bodies of requests are not shown; answers are, as evidence.

CREATE OR REPLACE VIEW once.calls AS
SELECT c.id, c.state::text AS state, c.provider, c.operation, c.tenant, c.scope, c.key, c.ordinal, c.method, c.path,
       c.attempts, c.asked, c.doubted, c.contradicted, c.reference, c.last_note, c.requested_at, c.sent_at, c.unknown_since,
       c.settled_at, c.next_at, c.leased_until, c.worker, octet_length(c.body) AS body_bytes
FROM once.call c;

-- What nobody knows, since when, how often the provider was asked, and what was said last.
CREATE OR REPLACE VIEW once.calls_unknown AS
SELECT c.id, c.state::text AS state, c.provider, c.operation, c.tenant, c.scope, c.key, c.reference,
       coalesce(c.unknown_since, c.leased_until) AS unknown_since,
       once.clock() - coalesce(c.unknown_since, c.leased_until) AS unknown_for,
       c.attempts, c.asked, c.contradicted, c.last_note, e.at AS last_said_at, e.kind AS last_kind, e.source AS last_source,
       e.verdict AS last_verdict, e.code AS last_code, c.next_at
FROM once.call c LEFT JOIN LATERAL (
    SELECT * FROM once.call_evidence v WHERE v.call_id = c.id ORDER BY v.id DESC LIMIT 1) e ON true
WHERE c.state IN ('unknown', 'escalated') OR (c.state = 'sent' AND c.leased_until <= once.clock());

CREATE OR REPLACE VIEW once.calls_evidence AS
SELECT e.id, e.call_id, e.at, e.kind, e.source, e.verdict, e.state::text AS state, e.code, e.headers, e.body, e.note
FROM once.call_evidence e;

CREATE OR REPLACE VIEW once.calls_notices AS
SELECT n.provider, n.notice_id, n.received_at, n.call_id, n.provider_key, n.reference, n.verdict, n.looked, n.look_at
FROM once.call_notice n;

-- What is under way, by provider and state. Settled calls are not counted: there may be many.
CREATE OR REPLACE VIEW once.calls_open AS
SELECT c.provider, c.state::text AS state, count(*) AS calls, min(coalesce(c.unknown_since, c.requested_at)) AS oldest_at,
       once.clock() - min(coalesce(c.unknown_since, c.requested_at)) AS oldest_age
FROM once.call c WHERE c.state IN ('requested', 'sent', 'unknown', 'escalated') GROUP BY c.provider, c.state;

CREATE OR REPLACE VIEW once.providers AS
SELECT p.provider, p.base_url, p.key_header, p.header_env, p.timeout, p.grace, p.resend, p.accepted, p.server_error,
       p.verify_failed, p.reference, p.reconcile, p.reconcile_rule, p.absent, p.absent_after, p.on_settled, p.attempts_max,
       p.backoff, p.backoff_max, p.reconcile_after, p.escalate_after, p.rate_per_second, p.breaker_failures, p.breaker_open_for,
       coalesce(p.retention::text, 'permanent') AS retention, p.updated_at, s.paused_until, s.failures, s.opened_until,
       CASE WHEN s.opened_until IS NULL THEN 'closed' WHEN s.opened_until > once.clock() THEN 'open' ELSE 'half-open' END AS breaker
FROM once.provider p JOIN once.provider_state s USING (provider);
