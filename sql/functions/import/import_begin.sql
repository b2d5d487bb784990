-- The start of a batch's transaction: locks the job, so that no other batch of it is written meanwhile, and answers which
-- row is next. Raises where the job is not the caller's any more. After a COMMIT whose answer was lost the same call tells
-- what became of it: it waits for the lost transaction to end, and next_row has moved or not.
CREATE OR REPLACE FUNCTION once.import_begin(p_job bigint, p_claim_id uuid)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_next bigint;
BEGIN
    SELECT j.next_row INTO v_next FROM once.import_job j
    WHERE j.id = p_job AND j.claim_id = p_claim_id AND j.state = 'running' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM once.import_lost();
    END IF;
    RETURN v_next;
END $$;
