-- Asks the SQL function that the provider's reconcile rule names, and records what it says. It gets the call as jsonb and
-- answers a verdict, or an object with verdict, reference and note. One that raises or answers nonsense is unclear.
CREATE OR REPLACE FUNCTION once.call_ask_sql(p_id uuid, p_claim_id uuid)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_call once.call := once.hold_call(p_id, p_claim_id);
    v_rule jsonb := (SELECT p.reconcile_rule FROM once.provider p WHERE p.provider = v_call.provider);
    v_proc pg_catalog.pg_proc;
    v_said jsonb;
    v_answer text;
BEGIN
    BEGIN
        SELECT p.* INTO STRICT v_proc FROM pg_proc p WHERE p.oid = to_regproc(v_rule ->> 'function');
        EXECUTE format('SELECT %s($1)::text', v_proc.oid::regproc) INTO v_answer
            USING to_jsonb(v_call) - ARRAY['body', 'request_hash', 'claim_id'];
        v_said := CASE v_proc.prorettype WHEN 'jsonb'::regtype THEN v_answer::jsonb ELSE jsonb_build_object('verdict', v_answer) END;
    EXCEPTION WHEN OTHERS THEN
        IF SQLSTATE IN ('40001', '40P01') THEN
            RAISE;
        END IF;
        v_said := jsonb_build_object('verdict', 'unclear', 'note', 'the function raised ' || SQLSTATE);
    END;
    IF (v_said ->> 'verdict' IN ('confirmed', 'failed', 'pending', 'unclear', 'absent')) IS NOT TRUE THEN
        v_said := jsonb_build_object('verdict', 'unclear', 'note', 'the function answered no verdict');
    END IF;
    RETURN once.call_asked(p_id, p_claim_id, 'answered', p_note => v_said ->> 'note', p_verdict => v_said ->> 'verdict',
        p_reference => v_said ->> 'reference');
END $$;
