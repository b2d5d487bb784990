-- One text of a policy, checked against its choices (NULL: any).
CREATE OR REPLACE FUNCTION once.policy_text(p_name text, p_value jsonb, p_choices text[])
RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF jsonb_typeof(p_value) <> 'string' OR p_value #>> '{}' <> ALL (p_choices) OR length(p_value #>> '{}') > 500 THEN
        RAISE EXCEPTION 'policy % has a value that it cannot have', p_name
            USING ERRCODE = 'P4020', HINT = coalesce('It is one of ' || array_to_string(p_choices, ', ') || '.',
                                                     'It is a text of at most 500 characters.');
    END IF;
    RETURN p_value #>> '{}';
END $$;
