-- One yes or no of a policy, checked.
CREATE OR REPLACE FUNCTION once.policy_boolean(p_name text, p_value jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF jsonb_typeof(p_value) <> 'boolean' THEN
        RAISE EXCEPTION 'policy % must be true or false', p_name USING ERRCODE = 'P4020';
    END IF;
    RETURN p_value #>> '{}';
END $$;
