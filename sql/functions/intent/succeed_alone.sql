-- once.succeed_batch for one intent, without its arrays. Nothing in the way: the single form is cheaper. Else the
-- set-based one says what is.
CREATE OR REPLACE FUNCTION once.succeed_alone(
    p_tenant text, p_scope text, p_key text, p_claim_id uuid, p_response_code int, p_response_headers jsonb,
    p_response_body bytea, p_result_type text, p_result_id text)
RETURNS once.completion_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_answer once.completion_answer;
    v_expires timestamptz;
    v_now timestamptz;
BEGIN
    -- A row with a lease is processing (intent_shape); asked for by its status, it might be looked up among all that
    -- are, by an index that seemed empty once.
    PERFORM 1 FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key AND i.claim_id = p_claim_id
          AND i.locked_until IS NOT NULL
        FOR UPDATE SKIP LOCKED;
    IF FOUND AND once.answer_fits(p_response_body, p_response_headers, p_result_type, p_result_id) THEN
        PERFORM once.complete(p_tenant, p_scope, p_key, p_claim_id, 'succeeded', 'P4010', p_response_code,
            p_response_headers, p_response_body, p_result_type, p_result_id, NULL, NULL);
        SELECT i.expires_at INTO v_expires FROM once.intent i
            WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
        v_now := once.clock();
        RETURN ROW(1, 'recorded', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                   once.expires_in_ms(v_expires, v_now))::once.completion_answer;
    END IF;
    SELECT * INTO v_answer FROM once.complete_batch(ARRAY[p_tenant], ARRAY[p_scope], ARRAY[p_key], ARRAY[p_claim_id],
        ARRAY[p_response_code], ARRAY[p_response_headers], ARRAY[p_response_body], ARRAY[p_result_type],
        ARRAY[p_result_id]);
    RETURN v_answer;
END $$;
