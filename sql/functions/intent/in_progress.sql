-- "Somebody is at it": when to come again. Of a leased rival we know the lease; an atomic one has no row yet.
CREATE OR REPLACE FUNCTION once.in_progress(p_row once.intent) RETURNS once.claim_result
LANGUAGE sql VOLATILE AS $$
    SELECT ROW('processing_active', NULL, p_row.attempt_count, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        p_row.locked_until,
        CASE WHEN p_row.locked_until > once.clock()
             THEN ceil(extract(epoch FROM p_row.locked_until - once.clock()) * 1000)::bigint ELSE 1000 END,
        NULL, NULL, NULL)::once.claim_result $$;
