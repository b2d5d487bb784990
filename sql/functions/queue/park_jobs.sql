-- Parks the picked jobs of these keys whose turn it is not, so that takes need not walk over them. What stands before them
-- is locked first, shared and without waiting, and looked at again under the lock: so whoever ends it does that after
-- this has committed, and then sees who is parked. Where somebody is at it just now, nothing is parked: a job that
-- stays ready is looked at again, one that was parked too late would sleep for ever.
CREATE OR REPLACE FUNCTION once.park_jobs(
    p_queue int, p_at_once int, p_ids bigint[], p_tenants text[], p_keys text[], p_turns bigint[])
RETURNS void LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off AS $$
DECLARE
    v_before bigint[];
    v_running boolean[];
    v_places int[];
    v_held bigint[];
    v_locked int[];
BEGIN
    IF cardinality(p_ids) = cardinality(p_turns) THEN
        RETURN;
    END IF;
    -- Of each key, those that hold the others back: the first ones, and those that run. A job of this take's own turn is
    -- as good as running.
    SELECT array_agg(b.id), array_agg(b.running), array_agg(k.place::int) INTO v_before, v_running, v_places
    FROM unnest(p_tenants, p_keys) WITH ORDINALITY k (tenant, key, place)
    CROSS JOIN LATERAL (
        (SELECT h.id, h.state = 'running' AS running FROM once.job h
         WHERE h.queue = p_queue AND h.tenant = k.tenant AND h.key = k.key AND h.state <> 'delayed'
         ORDER BY h.id LIMIT p_at_once)
        UNION
        (SELECT r.id, true FROM once.job r
         WHERE r.queue = p_queue AND r.tenant = k.tenant AND r.key = k.key AND r.state = 'running' LIMIT p_at_once)) b;
    v_held := ARRAY(
        SELECT j.id FROM unnest(v_before, v_running) b (id, running) JOIN once.job j ON j.id = b.id
        WHERE j.state = 'running' OR (NOT b.running AND j.state <> 'delayed')
        FOR SHARE OF j SKIP LOCKED);
    -- A key counts where all of them are locked, and are what they were.
    v_locked := ARRAY(SELECT b.place FROM unnest(v_before, v_places) b (id, place)
                      GROUP BY b.place HAVING bool_and(b.id = ANY (v_held)));
    UPDATE once.job j SET state = 'parked'
    FROM unnest(v_locked) l (place)
    WHERE j.id = ANY (p_ids) AND j.id <> ALL (p_turns) AND j.state = 'ready'
      AND j.tenant = p_tenants[l.place] AND j.key = p_keys[l.place]
      -- Nobody is held back by itself.
      AND EXISTS (SELECT FROM unnest(v_before, v_places) b (id, place) WHERE b.place = l.place AND b.id <> j.id);
END $$;
