-- Takes running jobs, locked by the caller, from workers that did not come back in time. Attempts were counted when they
-- were taken: one whose attempts are used up is buried, so that a job that kills its worker does not do so for ever.
CREATE OR REPLACE FUNCTION once.rescue_jobs(p_ids bigint[]) RETURNS void LANGUAGE plpgsql VOLATILE
SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v_cancelled bigint[] := ARRAY(SELECT j.id FROM once.job j WHERE j.id = ANY (p_ids) AND j.cancel);
    v_spent bigint[] := ARRAY(SELECT j.id FROM once.job j WHERE j.id = ANY (p_ids) AND NOT j.cancel AND j.attempts >= j.attempts_max);
    v_queues int[];
    v_tenants text[];
    v_keys text[];
BEGIN
    IF cardinality(v_cancelled) > 0 THEN
        PERFORM once.end_jobs(v_cancelled, 'cancelled', 'cancelled; its worker did not come back');
    END IF;
    IF cardinality(v_spent) > 0 THEN
        PERFORM once.end_jobs(v_spent, 'buried', 'its attempts are used up; at the last one its worker did not come back within its lease');
    END IF;
    WITH back AS (
        UPDATE once.job j SET state = 'ready', leased_until = NULL, rescue_at = NULL, claim_id = NULL,
            last_error = 'its worker did not come back within its lease',
            position = once.front(j.queue, j.priority, j.position)
        WHERE j.id = ANY (p_ids) RETURNING j.queue, j.tenant, j.key
    )
    SELECT array_agg(b.queue), array_agg(b.tenant), array_agg(b.key) INTO v_queues, v_tenants, v_keys
    FROM back b WHERE b.key IS NOT NULL;
    PERFORM once.wake_keys(v_queues, v_tenants, v_keys);
END $$;
