-- The straight path of once.claim as one statement, for callers with the role once_direct: look, and if
-- nothing is there take the advisory lock, without a function call. Everything else answers NULL for both
-- replay and locked, and the caller goes on with once.claim in the same transaction.
-- $1 scope, $2 key, $3 fingerprint, $4 tenant. Kept equal to once.claim by the contract suite.
SELECT i.status = 'succeeded' AND i.fingerprint = $3 AND NOT i.stripped
           AND (i.expires_at IS NULL OR i.expires_at > once.clock()) AS replay,
       CASE WHEN i.claim_id IS NULL AND s.key_pattern IS NULL AND once.well_formed($4, $1, $2, $3)
            THEN pg_try_advisory_xact_lock(once.lock_key($4, $1, $2)) END AS locked,
       i.response_code, i.response_headers, i.response_body, i.result_type, i.result_id,
       s.response, (extract(epoch FROM s.retention) * 1000)::bigint, (extract(epoch FROM s.tombstone) * 1000)::bigint
FROM once.scope s
LEFT JOIN once.intent i ON i.tenant = $4 AND i.scope = $1 AND i.key = $2
WHERE s.scope = $1 AND s.tenant = $4
