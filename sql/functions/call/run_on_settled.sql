-- Calls the function that a provider's policy names for settled calls.
CREATE OR REPLACE FUNCTION once.run_on_settled(p_function text, p_id uuid, p_verdict text, p_reference text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_proc regproc := to_regproc(p_function);
BEGIN
    IF v_proc IS NULL THEN
        RAISE EXCEPTION 'on_settled does not exist any more' USING ERRCODE = 'P4020', HINT = 'Define the provider again.';
    END IF;
    EXECUTE format('SELECT %s($1, $2, $3)', v_proc) USING p_id, p_verdict, p_reference;
END $$;
