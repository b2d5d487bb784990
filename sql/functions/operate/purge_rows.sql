-- One batch of purge, returning each row that lost its answer or went, as it was: for whoever archives it
-- before committing. p_record false spares the work of describing them.
-- Bytes are described in hex, whatever the session prefers.
CREATE OR REPLACE FUNCTION once.purge_rows(p_limit int DEFAULT 10000, p_record boolean DEFAULT true)
RETURNS SETOF jsonb LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET bytea_output = hex AS $$
DECLARE
    v_now timestamptz := once.clock();
BEGIN
    PERFORM once.check_flags(p_record);
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT i.tenant, i.scope, i.key,
               NOT i.stripped AND i.tombstone_until > v_now AS keep,
               CASE WHEN p_record THEN to_jsonb(i) END AS record
        FROM once.intent i
        WHERE i.expires_at <= v_now AND i.status IN ('succeeded', 'failed_final', 'failed_retryable')
        ORDER BY i.expires_at LIMIT greatest(0, least(p_limit, 100000)) FOR UPDATE SKIP LOCKED
    ), stripped AS (
        UPDATE once.intent i SET
            stripped = true, expires_at = i.tombstone_until, updated_at = v_now, response_code = NULL,
            response_headers = NULL, response_body = NULL, result_type = NULL, result_id = NULL
        FROM due d WHERE d.keep AND i.tenant = d.tenant AND i.scope = d.scope AND i.key = d.key
    ), gone AS (
        DELETE FROM once.intent i USING due d
        WHERE NOT d.keep IS TRUE AND i.tenant = d.tenant AND i.scope = d.scope AND i.key = d.key
    )
    SELECT d.record FROM due d;
END $$;
