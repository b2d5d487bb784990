-- The straight path of once.claim as one statement, for callers with the role once_direct: look, and if nothing
-- is there take the advisory lock, without a function call. `found` true: the answer is in the row; `found` false: nothing is
-- there and the intent is the caller's. NULL: go on with once.claim in the same transaction.
-- One column says both, and no more are asked for than an answer has: each costs every protected write a look at its type.
-- The caller has checked tenant, scope, key and fingerprint, and knows that the scope has no key_pattern.
-- $1 scope, $2 key, $3 fingerprint, $4 tenant. Held equal to once.claim by the contract suite.
SELECT CASE WHEN i.claim_id IS NULL
            THEN nullif(NOT pg_try_advisory_xact_lock(once.lock_key($4, $1, $2)), true)
            ELSE nullif(i.status = 'succeeded' AND i.fingerprint = $3 AND NOT i.stripped
                        AND (i.expires_at IS NULL OR i.expires_at > once.clock()), false) END AS found,
       i.response_code, i.response_headers, i.response_body, i.result_type, i.result_id
FROM (SELECT) nothing
LEFT JOIN once.intent i ON i.tenant = $4 AND i.scope = $1 AND i.key = $2
