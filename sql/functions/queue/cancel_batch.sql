-- once.cancel_job for many jobs. What each is now, in the order given.
CREATE OR REPLACE FUNCTION once.cancel_batch(p_job_ids bigint[], p_tenant text DEFAULT '')
RETURNS text[] LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count int := once.check_parallel(cardinality(p_job_ids), once.shape(p_job_ids));
    v_states text[] := array_fill(NULL::text, ARRAY[v_count]);
    v_place int;
BEGIN
    FOR v_place IN SELECT e.place FROM unnest(p_job_ids) WITH ORDINALITY e (id, place) ORDER BY e.id LOOP
        v_states[v_place] := once.cancel_job(p_job_ids[v_place], p_tenant);
    END LOOP;
    RETURN v_states;
END $$;
