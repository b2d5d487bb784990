-- The straight path of once.claim as one statement, for callers with the role once_direct: look, and if nothing
-- is there take the advisory lock, without a function call. `replay` true: the answer is in the row; `locked`
-- true: the intent is the caller's. Anything else: go on with once.claim in the same transaction.
-- The caller has checked tenant, scope, key and fingerprint, and knows that the scope has no key_pattern.
-- $1 scope, $2 key, $3 fingerprint, $4 tenant. Held equal to once.claim by the contract suite.
SELECT i.status = 'succeeded' AND i.fingerprint = $3 AND NOT i.stripped
           AND (i.expires_at IS NULL OR i.expires_at > once.clock()) AS replay,
       CASE WHEN i.claim_id IS NULL THEN pg_try_advisory_xact_lock(once.lock_key($4, $1, $2)) END AS locked,
       i.attempt_count, i.response_code, i.response_headers, i.response_body, i.result_type, i.result_id
FROM (SELECT) nothing
LEFT JOIN once.intent i ON i.tenant = $4 AND i.scope = $1 AND i.key = $2
