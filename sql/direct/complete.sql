-- The straight path of once.succeed as one statement: the terminal row, under the lock that the claim took.
-- A rival that was first makes it raise 23505 on intent_pkey, in any isolation level; the caller takes that,
-- and only that, for 40001: rolls back and runs again (trap 24).
-- $1 scope, $2 key, $3 fingerprint, $4 tenant, $5 claim id, $6 retention in ms, $7 tombstone in ms, $8 code,
-- $9 headers, $10 body, $11 result type, $12 result id.
INSERT INTO once.intent (claim_id, created_at, expires_at, tombstone_until, status, attempt_count, response_code,
    tenant, scope, key, fingerprint, result_type, result_id, response_headers, response_body)
VALUES ($5, once.clock(), once.clock() + $6::bigint * interval '1 millisecond',
    once.clock() + ($6::bigint + $7::bigint) * interval '1 millisecond', 'succeeded', 1, $8, $4, $1, $2, $3, $11, $12, $9, $10)
