-- One duration of a policy, checked. 'permanent' and 'none' are the caller's business.
CREATE OR REPLACE FUNCTION once.policy_interval(p_name text, p_value jsonb, p_min interval, p_max interval)
RETURNS interval LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_result interval;
BEGIN
    IF jsonb_typeof(p_value) <> 'string' THEN
        RAISE EXCEPTION 'policy % must be a duration written as text', p_name
            USING ERRCODE = 'P4020', HINT = 'For example "30s", "5m", "24h" or "30d".';
    END IF;
    BEGIN
        v_result := (p_value #>> '{}')::interval;
    EXCEPTION WHEN invalid_datetime_format OR datetime_field_overflow OR interval_field_overflow THEN
        RAISE EXCEPTION 'policy % is not a duration', p_name
            USING ERRCODE = 'P4020', HINT = 'For example "30s", "5m", "24h" or "30d".';
    END;
    IF v_result < p_min OR v_result > p_max THEN
        RAISE EXCEPTION 'policy % must be between % and %', p_name, p_min, p_max USING ERRCODE = 'P4020';
    END IF;
    RETURN v_result;
END $$;
