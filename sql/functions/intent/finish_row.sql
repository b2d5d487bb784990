-- Moves a locked, unowned row to a decided state, with a new claim id and an audit entry: recovery,
-- takeover and operators all come through here. Terminal rows are refused by its callers.
CREATE OR REPLACE FUNCTION once.finish_row(
    p_row once.intent, p_policy once.scope, p_status once.intent_status, p_actor text, p_action text, p_reason text,
    p_response_code int DEFAULT NULL, p_response_headers jsonb DEFAULT NULL, p_response_body bytea DEFAULT NULL,
    p_result_type text DEFAULT NULL, p_result_id text DEFAULT NULL,
    p_failure_code text DEFAULT NULL, p_failure_message text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_claim uuid := gen_random_uuid();
    v_now timestamptz := once.clock();
BEGIN
    UPDATE once.intent i SET
        claim_id = v_claim, status = p_status, locked_until = NULL, updated_at = v_now,
        completed_at = CASE WHEN p_status IN ('succeeded', 'failed_final') THEN v_now END,
        expires_at = CASE WHEN p_status <> 'uncertain' THEN v_now + p_policy.retention END,
        tombstone_until = CASE WHEN p_status = 'succeeded' THEN v_now + p_policy.retention + p_policy.tombstone END,
        response_code = p_response_code, response_headers = p_response_headers, response_body = p_response_body,
        result_type = p_result_type, result_id = p_result_id,
        failure_code = p_failure_code, failure_message = p_failure_message
    WHERE i.tenant = p_row.tenant AND i.scope = p_row.scope AND i.key = p_row.key;
    INSERT INTO once.audit (actor, action, tenant, scope, key, from_status, to_status, from_claim, to_claim, reason)
    VALUES (p_actor, p_action, p_row.tenant, p_row.scope, p_row.key,
            p_row.status::text, p_status::text, p_row.claim_id, v_claim, p_reason);
END $$;
