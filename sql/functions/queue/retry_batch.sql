-- once.retry for many jobs: all of them, or none. What each is now, in the order given.
CREATE OR REPLACE FUNCTION once.retry_batch(
    p_job_ids bigint[], p_claim_ids uuid[], p_errors text[] DEFAULT NULL, p_delays interval[] DEFAULT NULL)
RETURNS text[] LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count int := once.check_jobs(p_job_ids, p_claim_ids);
    v_states text[];
    v_place int;
BEGIN
    PERFORM once.check_parallel(v_count, once.shape(p_errors), once.shape(p_delays));
    FOR v_place IN SELECT e.place FROM unnest(p_job_ids) WITH ORDINALITY e (id, place) ORDER BY e.id LOOP
        v_states[v_place] := once.retry(p_job_ids[v_place], p_claim_ids[v_place], p_errors[v_place], p_delays[v_place]);
    END LOOP;
    RETURN coalesce(v_states, '{}');
END $$;
