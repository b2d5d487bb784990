-- One whole number of a policy, checked.
CREATE OR REPLACE FUNCTION once.policy_number(p_name text, p_value jsonb, p_min int, p_max int)
RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF jsonb_typeof(p_value) <> 'number' OR p_value #>> '{}' !~ '^[0-9]{1,8}$'
       OR (p_value #>> '{}')::int NOT BETWEEN p_min AND p_max THEN
        RAISE EXCEPTION 'policy % must be a whole number from % to %', p_name, p_min, p_max USING ERRCODE = 'P4020';
    END IF;
    RETURN p_value #>> '{}';
END $$;
