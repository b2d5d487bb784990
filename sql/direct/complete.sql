-- The straight path of once.succeed as one statement: the terminal row, under the lock that the claim took.
-- READ COMMITTED only: this snapshot is younger than the lock, so nobody comes between NOT EXISTS and INSERT.
-- No row inserted: a rival was first; the caller rolls back and runs again (trap 24).
-- $1 scope, $2 key, $3 fingerprint, $4 tenant, $5 claim id, $6 retention in ms, $7 tombstone in ms, $8 code,
-- $9 headers, $10 body, $11 result type, $12 result id.
INSERT INTO once.intent (claim_id, created_at, expires_at, tombstone_until, status, attempt_count, response_code,
    tenant, scope, key, fingerprint, result_type, result_id, response_headers, response_body)
SELECT $5, c.now, c.now + $6::bigint * interval '1 millisecond', c.now + ($6::bigint + $7::bigint) * interval '1 millisecond',
    'succeeded', 1, $8, $4, $1, $2, $3, $11, $12, $9, $10
FROM (SELECT once.clock() AS now) c
WHERE NOT EXISTS (SELECT 1 FROM once.intent i WHERE i.tenant = $4 AND i.scope = $1 AND i.key = $2)
