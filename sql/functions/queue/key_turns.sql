-- Which of the picked jobs, all of one queue and locked by the caller, may run now: those without a key; of a key, those
-- among its first p_at_once that stand, while fewer than p_at_once of it run. Whose turn it is not is parked.
-- The key's advisory lock, tried and never waited for, makes look and take one step among takes; the look is a statement
-- of its own, so that it sees what was committed before the lock was had. At most 100 keys a call: each is a lock.
CREATE OR REPLACE FUNCTION once.key_turns(p_queue int, p_at_once int, p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off AS $$
DECLARE
    v_free bigint[];
    v_tenants text[];
    v_keys text[];
    v_turns bigint[];
BEGIN
    SELECT array_agg(j.id) INTO v_free FROM unnest(p_ids) p (id) JOIN once.job j ON j.id = p.id WHERE j.key IS NULL;
    SELECT array_agg(k.tenant), array_agg(k.key) INTO v_tenants, v_keys FROM (
        SELECT j.tenant, j.key FROM unnest(p_ids) WITH ORDINALITY p (id, place) JOIN once.job j ON j.id = p.id
        WHERE j.key IS NOT NULL GROUP BY j.tenant, j.key ORDER BY min(p.place) LIMIT 100) k
    WHERE pg_try_advisory_xact_lock(once.lock_job_key(p_queue, k.tenant, k.key));
    IF v_keys IS NULL THEN
        RETURN coalesce(v_free, '{}');
    END IF;
    SELECT array_agg(t.id) INTO v_turns
    FROM unnest(v_tenants, v_keys) k (tenant, key)
    CROSS JOIN LATERAL (SELECT count(*) AS running FROM (
        SELECT FROM once.job r WHERE r.queue = p_queue AND r.tenant = k.tenant AND r.key = k.key AND r.state = 'running'
        LIMIT p_at_once) x) r
    CROSS JOIN LATERAL (
        SELECT f.id FROM (
            SELECT h.id FROM once.job h
            WHERE h.queue = p_queue AND h.tenant = k.tenant AND h.key = k.key AND h.state <> 'delayed'
            ORDER BY h.id LIMIT p_at_once) f
        WHERE f.id = ANY (p_ids) ORDER BY f.id LIMIT p_at_once - r.running) t;
    PERFORM once.park_jobs(p_queue, p_at_once, p_ids, v_tenants, v_keys, coalesce(v_turns, '{}'));
    RETURN coalesce(v_free, '{}') || coalesce(v_turns, '{}');
END $$;
