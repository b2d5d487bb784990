-- Ends the caller's import: done, or stopped with the reason, to be resumed.
CREATE OR REPLACE FUNCTION once.import_end(p_job bigint, p_claim_id uuid, p_state text, p_error text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (p_state IN ('done', 'stopped')) IS NOT TRUE THEN
        RAISE EXCEPTION 'an import ends as done or stopped' USING ERRCODE = 'P4080', HINT = 'p_state is done or stopped.';
    END IF;
    UPDATE once.import_job j SET state = p_state::once.import_state, leased_until = NULL, updated_at = once.clock(),
        ended_at = CASE WHEN p_state = 'done' THEN once.clock() END, last_error = left(p_error, 2000)
    WHERE j.id = p_job AND j.claim_id = p_claim_id AND j.state = 'running';
    IF NOT FOUND THEN
        PERFORM once.import_lost();
    END IF;
END $$;
