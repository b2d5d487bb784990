-- What a provider's answer to the question about a call means, by the provider's reconcile rule.
CREATE OR REPLACE FUNCTION once.judge_asked(p_rule jsonb, p_code int, p_body bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_value text;
BEGIN
    IF coalesce(p_rule -> 'absent_status', '[404]') @> to_jsonb(p_code) THEN
        RETURN 'absent';
    ELSIF p_code NOT BETWEEN 200 AND 299 OR p_code IS NULL THEN
        RETURN 'unclear';
    ELSIF NOT p_rule ? 'field' THEN
        RETURN 'confirmed';
    END IF;
    v_value := once.json_field(p_body, p_rule ->> 'field');
    RETURN CASE
        WHEN v_value IS NULL THEN coalesce(p_rule ->> 'missing', 'unclear')
        WHEN p_rule -> 'confirmed' ? v_value THEN 'confirmed'
        WHEN p_rule -> 'failed' ? v_value THEN 'failed'
        WHEN p_rule -> 'absent' ? v_value THEN 'absent'
        ELSE 'pending' END;
END $$;
