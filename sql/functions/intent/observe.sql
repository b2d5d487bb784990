-- The answer that an existing row gives to a caller, if it gives one: every kind except the three that
-- hand over ownership. NULL kind: the intent can be owned (once.own decides under the lock).
CREATE OR REPLACE FUNCTION once.observe(p_row once.intent, p_fingerprint bytea)
RETURNS once.claim_result LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := once.clock();
BEGIN
    IF once.is_gone(p_row, v_now) THEN
        RETURN NULL;
    END IF;
    IF p_row.fingerprint <> p_fingerprint THEN
        RAISE EXCEPTION 'key was used before with another payload'
            USING ERRCODE = 'P4002', DETAIL = 'Nothing was run; the stored answer belongs to the other payload.',
                  HINT = 'Use a new key for a new command; repeat the same payload for a retry.';
    END IF;
    CASE p_row.status
    WHEN 'succeeded' THEN
        IF p_row.stripped OR p_row.expires_at <= v_now THEN
            RETURN ROW('result_expired', NULL, p_row.attempt_count, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                       NULL, NULL, NULL, NULL)::once.claim_result;
        END IF;
        RETURN once.observed('replay_success', p_row);
    WHEN 'failed_final' THEN
        RETURN once.observed('final_failure', p_row);
    WHEN 'uncertain' THEN
        RETURN once.observed('uncertain', p_row);
    WHEN 'processing' THEN
        IF p_row.locked_until > v_now THEN
            RETURN once.in_progress(p_row);
        END IF;
        RETURN NULL;
    ELSE
        RETURN NULL;
    END CASE;
END $$;
