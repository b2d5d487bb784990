-- The whole of once.succeed_batch for more than one, or where something is in the way of one.
-- For the settings see once.look_batch.
CREATE OR REPLACE FUNCTION once.complete_batch(
    p_tenants text[], p_scopes text[], p_keys text[], p_claim_ids uuid[], p_response_codes int[],
    p_response_headers jsonb[], p_response_bodies bytea[], p_result_types text[], p_result_ids text[])
RETURNS SETOF once.completion_answer
LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_rows tid[];
    v_retention interval[];
    v_tombstone interval[];
    v_response text[];
    v_written int;
BEGIN
    -- Lock what is ours, in the order of the keys. A terminal row is locked, too: that makes this commit wait
    -- for the standby, so that `before` is as durable as `recorded`. v_rows: what may be written, else NULL.
    WITH asked AS MATERIALIZED (
        SELECT a.*, row_number() OVER (PARTITION BY a.tenant COLLATE "C", a.scope COLLATE "C", a.key COLLATE "C"
                                       ORDER BY a.ordinal) = 1 AS first
        FROM (SELECT u.tenant, u.scope, u.key, u.claim_id, u.ordinal,
                     once.answer_fits(u.body, u.headers, u.result_type, u.result_id) AS fits
              FROM unnest(p_tenants, p_scopes, p_keys, p_claim_ids, p_response_bodies, p_response_headers, p_result_types, p_result_ids)
                  WITH ORDINALITY AS u (tenant, scope, key, claim_id, body, headers, result_type, result_id, ordinal)) a
    ), rules AS MATERIALIZED (
        SELECT d.tenant, d.scope, p.retention, p.tombstone, p.response
        FROM (SELECT DISTINCT a.tenant, a.scope FROM asked a) d CROSS JOIN LATERAL once.policy(d.tenant, d.scope) p
    ), locked AS MATERIALIZED (
        SELECT a.ordinal, a.tenant, a.scope, l.row
        FROM (SELECT * FROM asked a ORDER BY a.tenant COLLATE "C", a.scope COLLATE "C", a.key COLLATE "C" OFFSET 0) a
        LEFT JOIN LATERAL (
            SELECT CASE WHEN i.status = 'processing' AND a.fits THEN i.ctid END AS row
            FROM once.intent i
            WHERE i.tenant = a.tenant AND i.scope = a.scope AND i.key = a.key AND i.claim_id = a.claim_id AND a.first
            FOR UPDATE SKIP LOCKED) l ON true
    )
    SELECT array_agg(s.row), array_agg(s.retention), array_agg(s.tombstone), array_agg(s.response)
    INTO v_rows, v_retention, v_tombstone, v_response
    FROM (SELECT l.row, r.retention, r.tombstone, r.response
          FROM locked l LEFT JOIN rules r ON r.tenant = l.tenant AND r.scope = l.scope ORDER BY l.ordinal) s;

    -- The rows are locked, so nothing of them can have changed since; see once.complete for what is written.
    UPDATE once.intent i SET
        status = 'succeeded', updated_at = v_now, locked_until = NULL, completed_at = v_now,
        expires_at = v_now + a.retention, tombstone_until = v_now + a.retention + a.tombstone,
        response_code = CASE WHEN a.response <> 'error' THEN a.code END,
        result_type = CASE WHEN a.response IN ('full', 'reference') THEN a.result_type END,
        result_id = CASE WHEN a.response IN ('full', 'reference') THEN a.result_id END,
        response_headers = CASE WHEN a.response = 'full' THEN a.headers END,
        response_body = CASE WHEN a.response = 'full' THEN a.body END,
        failure_code = NULL, failure_message = NULL
    FROM unnest(v_rows, p_claim_ids, v_retention, v_tombstone, v_response, p_response_codes, p_response_headers,
                p_response_bodies, p_result_types, p_result_ids)
        AS a (row, claim_id, retention, tombstone, response, code, headers, body, result_type, result_id)
    WHERE i.ctid = a.row AND i.claim_id = a.claim_id;
    GET DIAGNOSTICS v_written = ROW_COUNT;
    IF v_written <> cardinality(array_remove(v_rows, NULL)) THEN -- never `recorded` for what was not written (trap 1)
        RAISE EXCEPTION 'rows changed while they were locked' USING ERRCODE = '40001', HINT = 'Send the batch again.';
    END IF;

    RETURN QUERY
    SELECT a.ordinal::int,
        CASE WHEN a.row IS NOT NULL THEN 'recorded'
             WHEN i.status IN ('succeeded', 'failed_final') THEN 'before'
             WHEN i.status IS DISTINCT FROM 'processing' THEN 'lost'
             WHEN NOT once.answer_fits(a.body, a.headers, a.result_type, a.result_id) THEN 'too_large'
             ELSE 'busy' END,
        i.status::text, i.response_code, i.response_headers, i.response_body, i.result_type, i.result_id,
        i.failure_code, i.failure_message,
        once.expires_in_ms(CASE WHEN a.row IS NOT NULL THEN v_now + a.retention ELSE i.expires_at END, v_now)
    FROM unnest(p_tenants, p_scopes, p_keys, p_claim_ids, p_response_bodies, p_response_headers, p_result_types, p_result_ids,
                v_rows, v_retention)
        WITH ORDINALITY AS a (tenant, scope, key, claim_id, body, headers, result_type, result_id, row, retention, ordinal)
    LEFT JOIN LATERAL (
        SELECT * FROM once.intent i
        WHERE i.tenant = a.tenant AND i.scope = a.scope AND i.key = a.key AND i.claim_id = a.claim_id
          AND a.row IS NULL OFFSET 0) i ON true;
END $$;
