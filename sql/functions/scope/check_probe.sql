-- A probe tells what became of an intent whose owner vanished. It is any function of the caller's:
-- (tenant text, scope text, key text), (scope text, key text) or (key text); it answers boolean
-- (true: the effect is there, false: it is not, NULL: cannot tell), or text or jsonb with a verdict
-- 'succeeded', 'not_done' or 'unknown' (jsonb: also result_type, result_id, response_code).
-- It runs as the owner of the schema once, so whoever names it must be allowed to call it.
CREATE OR REPLACE FUNCTION once.check_probe(p_probe text) RETURNS void LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_proc pg_catalog.pg_proc;
BEGIN
    BEGIN
        SELECT p.* INTO v_proc FROM pg_proc p WHERE p.oid = to_regproc(p_probe);
    EXCEPTION WHEN invalid_name OR syntax_error OR feature_not_supported THEN NULL; -- what is no name names nothing
    END;
    IF v_proc.oid IS NULL THEN
        RAISE EXCEPTION 'policy probe names no function, or several' USING ERRCODE = 'P4020',
            HINT = 'Write schema.function; it must exist when the scope is defined.';
    END IF;
    IF v_proc.pronargs NOT BETWEEN 1 AND 3 OR v_proc.proretset
       OR EXISTS (SELECT 1 FROM unnest(v_proc.proargtypes::oid[]) t WHERE t <> 'text'::regtype)
       OR v_proc.prorettype NOT IN ('boolean'::regtype, 'text'::regtype, 'jsonb'::regtype)
       OR v_proc.pronamespace IN ('once'::regnamespace, 'pg_catalog'::regnamespace) THEN
        RAISE EXCEPTION 'policy probe has the wrong shape' USING ERRCODE = 'P4020',
            HINT = 'It takes (tenant text, scope text, key text) and returns boolean, text or jsonb.';
    END IF;
    IF NOT has_function_privilege(session_user, v_proc.oid, 'EXECUTE')
       OR NOT has_function_privilege(v_proc.oid, 'EXECUTE')
       OR NOT has_schema_privilege(v_proc.pronamespace, 'USAGE') THEN
        RAISE EXCEPTION 'policy probe may not be called' USING ERRCODE = 'P4020', HINT =
            'You and the owner of schema once both need EXECUTE on it, and USAGE on its schema.';
    END IF;
END $$;
