-- The scope of a unique key: what the call says, else what the queue says.
CREATE OR REPLACE FUNCTION once.check_unique(p_default once.unique_scope, p_scope text, p_window interval)
RETURNS once.unique_scope LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_scope NOT IN ('waiting', 'alive', 'window')
       OR (p_window BETWEEN interval '1 millisecond' AND interval '100 years') IS FALSE THEN
        RAISE EXCEPTION 'no such scope of uniqueness, or a window out of range' USING ERRCODE = 'P4020',
            HINT = 'Scopes are waiting, alive and window; a window lasts 1 ms to 100 years.';
    END IF;
    RETURN coalesce(p_scope::once.unique_scope, CASE WHEN p_window IS NOT NULL THEN 'window'::once.unique_scope END, p_default);
END $$;
