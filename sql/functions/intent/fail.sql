-- Records a failure under the claim's fence. Retryable: the next claim runs again, until attempts_max.
-- Final: every later claim observes it. Call it in a transaction that lives: after the rollback of the
-- effect's own (trap 9); once.record_failure does both steps for atomic callers.
CREATE OR REPLACE FUNCTION once.fail(
    p_scope text, p_key text, p_claim_id uuid, p_retryable boolean, p_code text, p_message text DEFAULT NULL,
    p_response_code int DEFAULT NULL, p_response_headers jsonb DEFAULT NULL, p_response_body bytea DEFAULT NULL,
    p_tenant text DEFAULT '')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM once.check_flags(p_retryable);
    IF NOT once.answer_fits(p_response_body, p_response_headers, NULL, NULL) THEN
        PERFORM once.check_answer(p_response_body, p_response_headers, NULL, NULL);
    END IF;
    PERFORM once.complete(p_tenant, p_scope, p_key, p_claim_id,
        CASE WHEN p_retryable THEN 'failed_retryable' ELSE 'failed_final' END::once.intent_status, 'P4011',
        p_response_code, p_response_headers, p_response_body, NULL, NULL,
        left(coalesce(p_code, 'unspecified'), 100), left(p_message, 2000));
END $$;
