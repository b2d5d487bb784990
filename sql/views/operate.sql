-- What operators ask, over private tables. Re-applied by every migrate; columns are only ever added at the end.

CREATE OR REPLACE VIEW once.intents AS
SELECT i.tenant, i.scope, i.key, i.status::text AS status, i.attempt_count, i.result_type, i.result_id,
       i.response_code, i.response_headers, i.response_body, i.failure_code, i.failure_message,
       i.claim_id, i.claimed_by, i.locked_until, i.fence, i.fingerprint,
       i.created_at, coalesce(i.updated_at, i.created_at) AS updated_at,
       CASE WHEN i.status IN ('succeeded', 'failed_final') THEN coalesce(i.completed_at, i.created_at) END AS completed_at,
       i.expires_at, i.tombstone_until, i.stripped AS result_expired
FROM once.intent i;

CREATE OR REPLACE VIEW once.scopes AS
SELECT nullif(s.scope, '') AS scope, s.tenant, s.mode,
       CASE WHEN s.retention IS NULL THEN 'permanent' WHEN s.retention = interval '0' THEN 'none' ELSE s.retention::text END AS retention,
       CASE WHEN s.tombstone IS NULL THEN 'none' WHEN s.tombstone = interval '10000 years' THEN 'permanent' ELSE s.tombstone::text END AS tombstone,
       s.lease, coalesce(s.in_progress, CASE s.mode WHEN 'atomic' THEN 'wait' ELSE 'refuse' END) AS in_progress,
       s.wait_max, s.waiters_max, s.stale, s.probe, s.response, s.attempts_max, s.key_pattern, s.updated_at,
       s.scope = '' AS is_default
FROM once.scope s;

CREATE OR REPLACE VIEW once.stale_claims AS
SELECT i.tenant, i.scope, i.key, i.claimed_by, i.attempt_count, i.locked_until,
       once.clock() - i.locked_until AS overdue, i.created_at
FROM once.intent i WHERE i.status = 'processing' AND i.locked_until <= once.clock();

CREATE OR REPLACE VIEW once.uncertain AS
SELECT i.tenant, i.scope, i.key, i.attempt_count, i.failure_code, i.failure_message,
       once.clock() - coalesce(i.updated_at, i.created_at) AS since, i.created_at
FROM once.intent i WHERE i.status = 'uncertain';

CREATE OR REPLACE VIEW once.most_retried AS
SELECT i.tenant, i.scope, i.key, i.status::text AS status, i.attempt_count, i.failure_code,
       coalesce(i.updated_at, i.created_at) AS updated_at
FROM once.intent i WHERE i.attempt_count > 1 ORDER BY i.attempt_count DESC LIMIT 1000;

CREATE OR REPLACE VIEW once.suppression AS
SELECT t.day, t.tenant, t.scope,
       sum(t.count) AS answers,
       sum(t.count) FILTER (WHERE t.kind IN ('new_claim', 'retryable_failure', 'processing_stale')) AS executions,
       sum(t.count) FILTER (WHERE t.kind NOT IN ('new_claim', 'retryable_failure', 'processing_stale')) AS suppressed,
       round(coalesce(sum(t.count) FILTER (WHERE t.kind NOT IN ('new_claim', 'retryable_failure', 'processing_stale')), 0)
             / nullif(sum(t.count), 0), 4) AS suppression_rate
FROM once.tally_day t GROUP BY t.day, t.tenant, t.scope;

CREATE OR REPLACE VIEW once.sizes AS
SELECT c.relname::text AS relation, greatest(c.reltuples, 0)::bigint AS rows_estimated,
       pg_table_size(c.oid) AS table_bytes, pg_indexes_size(c.oid) AS index_bytes,
       s.n_dead_tup AS dead_rows, s.last_autovacuum
FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.relnamespace = 'once'::regnamespace AND c.relkind IN ('r', 'p');

CREATE OR REPLACE VIEW once.growth AS
SELECT s.at, s.rows, s.table_bytes, s.index_bytes,
       s.rows - lag(s.rows) OVER (ORDER BY s.at) AS rows_added,
       s.table_bytes + s.index_bytes - lag(s.table_bytes + s.index_bytes) OVER (ORDER BY s.at) AS bytes_added
FROM once.size_sample s;

CREATE OR REPLACE VIEW once.audit_trail AS
SELECT a.* FROM once.audit a;

CREATE OR REPLACE VIEW once.history AS
SELECT h.* FROM once.intent_history h;

CREATE OR REPLACE VIEW once.migrations AS
SELECT m.version, m.name, m.checksum, m.breaking, m.applied_at, m.applied_by FROM once.migration m;
