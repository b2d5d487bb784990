-- After jobs have left: their unique keys are free, and the next of their keys is woken.
CREATE OR REPLACE FUNCTION once.free_names(p_jobs once.job[]) RETURNS void LANGUAGE plpgsql VOLATILE
SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off AS $$
DECLARE
    v_queues int[];
    v_tenants text[];
    v_keys text[];
BEGIN
    DELETE FROM once.job_unique u USING unnest(p_jobs) j
    WHERE j.unique_scope IN ('waiting', 'alive') AND u.queue = j.queue AND u.tenant = j.tenant AND u.unique_key = j.unique_key
      AND u.job_id = j.id;
    SELECT array_agg(j.queue), array_agg(j.tenant), array_agg(j.key) INTO v_queues, v_tenants, v_keys
    FROM unnest(p_jobs) j WHERE j.key IS NOT NULL;
    PERFORM once.wake_keys(v_queues, v_tenants, v_keys);
END $$;
