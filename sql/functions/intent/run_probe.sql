-- Asks the scope's probe what became of an intent. A probe that is missing, fails or answers nonsense
-- is "unknown": never a reason to run again.
CREATE OR REPLACE FUNCTION once.run_probe(p_probe text, p_tenant text, p_scope text, p_key text)
RETURNS jsonb LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_proc pg_catalog.pg_proc;
    v_args text[];
    v_answer text;
    v_result jsonb;
BEGIN
    SELECT p.* INTO v_proc FROM pg_proc p WHERE p.oid = to_regproc(p_probe);
    IF NOT FOUND THEN
        RETURN jsonb_build_object('verdict', 'unknown', 'reason', 'the probe function does not exist');
    END IF;
    v_args := CASE v_proc.pronargs WHEN 3 THEN ARRAY[p_tenant, p_scope, p_key]
                                   WHEN 2 THEN ARRAY[p_scope, p_key] ELSE ARRAY[p_key] END;
    EXECUTE format('SELECT %s(%s)::text', v_proc.oid::regproc,
                   (SELECT string_agg(format('$1[%s]', n), ', ' ORDER BY n) FROM generate_subscripts(v_args, 1) n))
        INTO v_answer USING v_args;
    v_result := CASE v_proc.prorettype
        WHEN 'boolean'::regtype THEN jsonb_build_object('verdict',
            CASE v_answer WHEN 'true' THEN 'succeeded' WHEN 'false' THEN 'not_done' ELSE 'unknown' END)
        WHEN 'jsonb'::regtype THEN v_answer::jsonb
        ELSE jsonb_build_object('verdict', v_answer) END;
    IF v_result ->> 'verdict' IN ('succeeded', 'not_done') THEN
        PERFORM (v_result ->> 'response_code')::int; -- nonsense in it is caught here, not raised to every claim
        RETURN v_result;
    END IF;
    RETURN jsonb_build_object('verdict', 'unknown', 'reason', 'the probe could not tell');
EXCEPTION WHEN OTHERS THEN
    IF SQLSTATE IN ('40001', '40P01') THEN
        RAISE;
    END IF;
    RETURN jsonb_build_object('verdict', 'unknown', 'reason', 'the probe raised ' || SQLSTATE);
END $$;
