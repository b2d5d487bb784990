-- Deletes these jobs of one take, where they are plain (no key whose next one waits, no unique key, so nothing is left to be
-- done) and all held under this claim id. False: nothing was done.
-- Jobs that were taken together stand together: one walk over their stretch of the index finds them all, where a search
-- for each would cost as much as its deletion. Where much of others lies between, it is not tried.
CREATE OR REPLACE FUNCTION once.finish_plain(p_job_ids bigint[], p_claim_id uuid) RETURNS boolean LANGUAGE plpgsql VOLATILE
SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_hashjoin = off AS $$
DECLARE
    v_first bigint;
    v_last bigint;
    v_gone int;
BEGIN
    SELECT min(e.id), max(e.id) INTO v_first, v_last FROM unnest(p_job_ids) e (id);
    IF v_last - v_first >= 4 * cardinality(p_job_ids) THEN
        RETURN false;
    END IF;
    -- Both sides come by id: so the rows are locked in the order of ids, as everybody locks them.
    DELETE FROM once.job j USING unnest(p_job_ids) e (id)
    WHERE j.id BETWEEN v_first AND v_last AND j.id = e.id AND j.claim_id = p_claim_id
      AND j.key IS NULL AND j.unique_scope IS DISTINCT FROM 'alive';
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    IF v_gone < cardinality(p_job_ids) THEN
        RAISE no_data_found; -- takes the deletions back
    END IF;
    RETURN true;
EXCEPTION WHEN no_data_found THEN
    RETURN false;
END $$;
