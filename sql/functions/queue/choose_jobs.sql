-- Which jobs a take hands out, as the places of their rows, locked (tids), and all ids among which theirs are (seen). Does
-- the queue's upkeep where it is time, or where too little is ready.
CREATE OR REPLACE FUNCTION once.choose_jobs(
    p_queue once.queue, p_tenant text, p_limit int, OUT seen bigint[], OUT tids tid[])
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_started timestamptz := once.clock();
    v_mark once.queue_mark;
    v_limit int := p_limit;
    v_want int;
    v_priorities int[];
    v_lows bigint[];
    v_last bigint;
    v_keeps boolean := false;    -- this take does the upkeep
    v_full boolean := false;     -- and looks from the beginning
    v_more boolean;
    v_picked record;
    v_far CONSTANT bigint := 6000;
    v_tids tid[];
BEGIN
    seen := '{}';
    tids := '{}';
    SELECT * INTO v_mark FROM once.queue_mark m WHERE m.queue = p_queue.id;
    IF v_mark IS NULL OR v_mark.kept_at <= v_started - interval '1 second' THEN
        v_keeps := pg_try_advisory_xact_lock(once.lock_queue(p_queue.id, 'upkeep'));
        IF v_keeps THEN
            SELECT * INTO v_mark FROM once.queue_mark m WHERE m.queue = p_queue.id;
            IF NOT FOUND THEN
                INSERT INTO once.queue_mark (queue) VALUES (p_queue.id) RETURNING * INTO v_mark;
            END IF;
            v_keeps := v_mark.kept_at <= v_started - interval '1 second'; -- nobody did it meanwhile
        END IF;
        IF v_keeps THEN
            v_full := v_mark.looked_at + least(interval '1 minute', greatest(interval '1 second', v_mark.look_ms * interval '20 milliseconds')) <= v_started;
            PERFORM once.ready_more(p_queue.id, 1000, CASE WHEN v_full THEN '-infinity' ELSE v_mark.due_low END,
                                    CASE WHEN v_full THEN '-infinity' ELSE v_mark.lease_low END);
        END IF;
    END IF;
    -- After the rescue: what dead workers held does not count any more.
    IF p_queue.running_max IS NOT NULL THEN
        IF NOT pg_try_advisory_xact_lock(once.lock_queue(p_queue.id, 'limit')) THEN
            RETURN;
        END IF;
        SELECT least(p_limit, p_queue.running_max - count(*)) INTO v_limit FROM (
            SELECT FROM once.job j WHERE j.queue = p_queue.id AND j.state = 'running' LIMIT p_queue.running_max) r;
    END IF;
    SELECT coalesce(array_agg(h.priority ORDER BY h.priority DESC), '{}'),
           coalesce(array_agg(CASE WHEN v_full THEN 0 ELSE h.low END ORDER BY h.priority DESC), '{}')
    INTO v_priorities, v_lows FROM once.queue_hint h WHERE h.queue = p_queue.id;
    SELECT s.last_value INTO v_last FROM once.job_id s;
    FOR v_round IN 1 .. 4 LOOP
        EXIT WHEN cardinality(tids) >= v_limit;
        -- Where many wait for their keys, more are looked at than are wanted.
        v_want := v_limit - cardinality(tids);
        SELECT * INTO v_picked FROM once.pick_jobs(p_queue.id, p_tenant, CASE v_round WHEN 1 THEN v_want ELSE greatest(v_want, 100) END,
                                                   seen, v_priorities, v_lows);
        -- A busy queue leaves much behind in a second: the hint follows when the way to the first job has become long.
        IF NOT v_keeps AND v_picked.ids[1] - v_lows[v_picked.hinted] > v_far
           AND pg_try_advisory_xact_lock(once.lock_queue(p_queue.id, 'upkeep')) THEN
            PERFORM once.move_hint(p_queue.id, v_priorities[v_picked.hinted], false, v_last);
        END IF;
        v_tids := v_picked.tids[1:v_want];
        IF NOT v_picked.plain THEN
            v_tids := once.turns(p_queue, v_picked.ids, v_want);
        END IF;
        tids := tids || v_tids;
        seen := seen || v_picked.ids;
        CONTINUE WHEN cardinality(v_picked.ids) > 0 AND cardinality(tids) < v_limit AND NOT v_picked.plain;
        -- Too little: see what else could be ready, once.
        EXIT WHEN cardinality(tids) >= v_limit OR v_more IS NOT NULL OR v_keeps;
        v_more := pg_try_advisory_xact_lock(once.lock_queue(p_queue.id, 'upkeep'))
            AND once.ready_more(p_queue.id, 1000, coalesce(v_mark.due_low, '-infinity'), coalesce(v_mark.lease_low, '-infinity'));
        EXIT WHEN NOT v_more;
    END LOOP;
    IF v_keeps THEN
        PERFORM once.move_hints(p_queue.id, v_full, v_started, v_last, tids);
    END IF;
END $$;
