-- The straight path of once.peek as one statement: the answer of an intent that succeeded, if it is live and of
-- this payload. No row: ask the functions. $1 scope, $2 key, $3 fingerprint, $4 tenant.
SELECT true, i.response_code, i.response_headers, i.response_body, i.result_type, i.result_id
FROM once.intent i
WHERE i.tenant = $4 AND i.scope = $1 AND i.key = $2 AND i.status = 'succeeded' AND i.fingerprint = $3 AND NOT i.stripped
  AND (i.expires_at IS NULL OR i.expires_at > once.clock())
