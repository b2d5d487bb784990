-- An operator's decision about an intent that is uncertain, retryable, or whose lease is over: audited,
-- with a reason. What is terminal stays (I6); a live lease is waited for, not cut.
CREATE OR REPLACE FUNCTION once.settle(
    p_scope text, p_key text, p_verdict text, p_actor text, p_reason text,
    p_result_type text DEFAULT NULL, p_result_id text DEFAULT NULL, p_response_code int DEFAULT NULL,
    p_response_headers jsonb DEFAULT NULL, p_response_body bytea DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row once.intent;
    v_policy once.scope;
    v_status once.intent_status;
BEGIN
    v_status := CASE p_verdict WHEN 'succeeded' THEN 'succeeded' WHEN 'retry' THEN 'failed_retryable'
                               WHEN 'failed' THEN 'failed_final' WHEN 'abandoned' THEN 'failed_final' END;
    IF v_status IS NULL OR coalesce(btrim(p_actor), '') = '' OR coalesce(btrim(p_reason), '') = '' THEN
        RAISE EXCEPTION 'settling needs a verdict, an actor and a reason' USING ERRCODE = 'P4013',
            HINT = 'Verdicts are succeeded, retry, failed and abandoned.';
    END IF;
    PERFORM once.check_answer(p_response_body, p_response_headers, p_result_type, p_result_id);
    SELECT * INTO v_row FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key FOR UPDATE;
    IF NOT FOUND OR once.is_gone(v_row, once.clock()) OR v_row.status IN ('succeeded', 'failed_final')
       OR (v_row.status = 'processing' AND v_row.locked_until > once.clock()) THEN
        RAISE EXCEPTION 'there is nothing to settle' USING ERRCODE = 'P4013',
            DETAIL = CASE WHEN v_row.claim_id IS NULL OR once.is_gone(v_row, once.clock()) THEN 'No such intent.'
                          WHEN v_row.status = 'processing' THEN 'Its lease is still running.'
                          ELSE 'It has its outcome already.' END,
            HINT = 'pgonce intents show tells its state.';
    END IF;
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    PERFORM once.finish_row(v_row, v_policy, v_status, p_actor, 'settle:' || p_verdict, p_reason,
        p_response_code => p_response_code, p_response_headers => p_response_headers,
        p_response_body => p_response_body, p_result_type => p_result_type, p_result_id => p_result_id,
        p_failure_code => CASE WHEN v_status <> 'succeeded' THEN 'settled_' || p_verdict END,
        p_failure_message => CASE WHEN v_status <> 'succeeded' THEN p_reason END);
    RETURN v_status::text;
END $$;
