-- After jobs of these keys have ended, or do not run any more: makes the first parked ones of each ready. Only a hint, for
-- take looks whose turn it is; so nothing is waited for. A parked job that somebody else has locked, and whatever a snapshot
-- of the whole transaction cannot see, is left to once.ready_more.
CREATE OR REPLACE FUNCTION once.wake_keys(p_queues int[], p_tenants text[], p_keys text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off AS $$
DECLARE
    v_seen bigint[];
    v_woken bigint[];
BEGIN
    IF p_keys IS NULL THEN
        RETURN;
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        INSERT INTO once.job_wake (queue, tenant, key)
        SELECT DISTINCT k.queue, k.tenant, k.key FROM unnest(p_queues, p_tenants, p_keys) k (queue, tenant, key);
        RETURN;
    END IF;
    SELECT array_agg(p.id) INTO v_seen
    FROM (SELECT DISTINCT d.queue, d.tenant, d.key FROM unnest(p_queues, p_tenants, p_keys) d (queue, tenant, key)) k
    JOIN once.queue q ON q.id = k.queue
    CROSS JOIN LATERAL (
        SELECT j.id FROM once.job j
        WHERE j.queue = k.queue AND j.tenant = k.tenant AND j.key = k.key AND j.state = 'parked'
        ORDER BY j.id LIMIT q.key_running_max) p;
    IF v_seen IS NULL THEN
        RETURN;
    END IF;
    WITH locked AS MATERIALIZED (
        SELECT j.id FROM once.job j WHERE j.id = ANY (v_seen) AND j.state = 'parked' FOR UPDATE SKIP LOCKED
    ), woken AS (
        UPDATE once.job j SET state = 'ready', position = once.front(j.queue, j.priority, j.position)
        FROM locked l WHERE j.id = l.id RETURNING j.id
    )
    SELECT array_agg(w.id) INTO v_woken FROM woken w;
    IF cardinality(v_seen) > coalesce(cardinality(v_woken), 0) THEN
        INSERT INTO once.job_wake (queue, tenant, key)
        SELECT DISTINCT j.queue, j.tenant, j.key FROM once.job j
        WHERE j.id = ANY (v_seen) AND j.id <> ALL (coalesce(v_woken, '{}')) AND j.state = 'parked';
    END IF;
END $$;
