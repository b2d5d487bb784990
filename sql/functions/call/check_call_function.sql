-- A function that a provider's policy names. It runs as the owner of the schema once, so whoever names it must be
-- allowed to call it.
CREATE OR REPLACE FUNCTION once.check_call_function(p_name text, p_function text, p_takes regtype[], p_returns regtype[])
RETURNS void LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_proc pg_catalog.pg_proc;
BEGIN
    BEGIN
        SELECT p.* INTO v_proc FROM pg_proc p WHERE p.oid = to_regproc(p_function);
    EXCEPTION
        WHEN invalid_name OR syntax_error OR feature_not_supported THEN NULL; -- what is no name names nothing
        WHEN insufficient_privilege THEN
            RAISE EXCEPTION 'policy % names a function that may not be called', p_name USING ERRCODE = 'P4020',
                HINT = 'The owner of schema once needs USAGE on its schema.';
    END;
    IF v_proc.oid IS NULL THEN
        RAISE EXCEPTION 'policy % names no function, or several', p_name USING ERRCODE = 'P4020',
            HINT = 'Write schema.function; it must exist when the provider is defined.';
    END IF;
    IF ARRAY(SELECT t::regtype FROM unnest(v_proc.proargtypes::oid[]) t) <> p_takes OR v_proc.proretset OR v_proc.prokind <> 'f'
       OR v_proc.prorettype::regtype <> ALL (p_returns)
       OR v_proc.pronamespace IN ('once'::regnamespace, 'pg_catalog'::regnamespace) THEN
        RAISE EXCEPTION 'policy % names a function of the wrong shape', p_name USING ERRCODE = 'P4020', HINT =
            'It takes (' || array_to_string(p_takes, ', ') || ') and returns ' || coalesce(array_to_string(p_returns, ' or '), 'anything') || '.';
    END IF;
    IF NOT has_function_privilege(session_user, v_proc.oid, 'EXECUTE') OR NOT has_function_privilege(v_proc.oid, 'EXECUTE')
       OR NOT has_schema_privilege(v_proc.pronamespace, 'USAGE') THEN
        RAISE EXCEPTION 'policy % names a function that may not be called', p_name USING ERRCODE = 'P4020', HINT =
            'You and the owner of schema once both need EXECUTE on it, and USAGE on its schema.';
    END IF;
END $$;
