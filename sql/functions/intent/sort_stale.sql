-- What becomes of a claim whose lease is over, or whose owner is in doubt (then with its code and message), by
-- the scope's policy: the one place that decides it.
-- The caller holds the row's lock. safe_to_retry leaves the row as it is, for the caller to go on;
-- every other class writes the verdict with a new claim id, so that the old owner's writes raise.
CREATE OR REPLACE FUNCTION once.sort_stale(
    p_row once.intent, p_policy once.scope, p_actor text, p_code text DEFAULT NULL, p_message text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_probe jsonb;
    v_class text;
    v_answer jsonb;
BEGIN
    IF p_policy.stale = 'probe' THEN
        v_probe := once.run_probe(p_policy.probe, p_row.tenant, p_row.scope, p_row.key);
    END IF;
    v_class := CASE
        WHEN v_probe ->> 'verdict' = 'succeeded' THEN 'already_succeeded'
        WHEN p_policy.stale = 'hold' OR (p_policy.stale = 'probe' AND v_probe ->> 'verdict' <> 'not_done')
            THEN 'manual_review'
        WHEN p_row.attempt_count >= p_policy.attempts_max THEN 'abandoned'
        ELSE 'safe_to_retry' END;
    IF v_class = 'safe_to_retry' THEN
        RETURN v_class;
    END IF;
    v_answer := CASE v_class WHEN 'already_succeeded' THEN v_probe END; -- what is not done has made nothing
    PERFORM once.finish_row(p_row, p_policy,
        CASE v_class WHEN 'already_succeeded' THEN 'succeeded' WHEN 'abandoned' THEN 'failed_final'
             ELSE 'uncertain' END::once.intent_status,
        p_actor, v_class, nullif(concat_ws('; ', 'doubt: ' || p_code, v_probe ->> 'reason'), ''),
        p_response_code => (v_answer ->> 'response_code')::int,
        p_result_type => v_answer ->> 'result_type', p_result_id => v_answer ->> 'result_id',
        p_failure_code => CASE v_class WHEN 'abandoned' THEN 'abandoned'
            WHEN 'manual_review' THEN coalesce(p_code, 'lease_expired') END,
        p_failure_message => CASE
            WHEN v_class = 'manual_review' AND p_code IS NULL
                THEN 'the lease ended without an outcome; the effect may or may not be there'
            WHEN v_class = 'manual_review' THEN p_message
            WHEN v_class = 'abandoned' AND p_code IS NULL
                THEN 'the lease ended and the attempts are used up; no outcome was recorded'
            WHEN v_class = 'abandoned'
                THEN 'the attempts are used up, and the last ended in doubt: ' || concat_ws(': ', p_code, p_message) END);
    RETURN v_class;
END $$;
