-- What a caller who does not own the intent gets to see of its row.
CREATE OR REPLACE FUNCTION once.observed(p_kind text, p_row once.intent) RETURNS once.claim_result
LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW(p_kind, NULL, p_row.attempt_count, p_row.response_code, p_row.response_headers, p_row.response_body,
        p_row.result_type, p_row.result_id, p_row.failure_code, p_row.failure_message,
        p_row.locked_until, NULL, p_row.expires_at, NULL, NULL)::once.claim_result $$;
