-- Moves jobs, locked by the caller, to the ended ones: buried or cancelled. Buried ones are kept until somebody decides.
CREATE OR REPLACE FUNCTION once.end_jobs(p_ids bigint[], p_state once.job_end, p_error text) RETURNS void
LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_jobs once.job[];
BEGIN
    WITH gone AS (
        DELETE FROM once.job j WHERE j.id = ANY (p_ids) RETURNING j AS job
    )
    SELECT array_agg(g.job) INTO v_jobs FROM gone g;
    INSERT INTO once.job_ended (id, ended_at, expires_at, enqueued_at, queue, priority, attempts, attempts_max, state, tenant,
                                key, unique_key, worker, last_error, payload)
    SELECT g.id, v_now, CASE WHEN p_state <> 'buried' THEN v_now + coalesce(q.keep, interval '1 day') END, g.enqueued_at,
           g.queue, g.priority, g.attempts, g.attempts_max, p_state, g.tenant, g.key, g.unique_key, g.worker,
           left(coalesce(p_error, g.last_error), 2000), g.payload
    FROM unnest(v_jobs) g JOIN once.queue q ON q.id = g.queue;
    PERFORM once.free_names(v_jobs);
END $$;
