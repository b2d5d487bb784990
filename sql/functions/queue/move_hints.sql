-- Moves the marks of where looks begin, about once a second a queue, by the take that did the upkeep (its lock is held).
-- p_last: the last place given out before this take looked. At most 32 priorities have one.
CREATE OR REPLACE FUNCTION once.move_hints(p_queue int, p_full boolean, p_started timestamptz, p_last bigint, p_chosen tid[])
RETURNS void LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_priority int;
    v_new int[];
    v_mark once.queue_mark;
    v_late timestamptz := p_started - interval '5 seconds'; -- room for those that commit a little late
BEGIN
    SELECT array_agg(DISTINCT j.priority) INTO v_new FROM once.job j WHERE j.ctid = ANY (p_chosen[1:100]);
    IF v_new IS NOT NULL THEN
        INSERT INTO once.queue_hint (queue, priority, low)
        SELECT p_queue, n, 0 FROM unnest(v_new) n
        WHERE (SELECT count(*) FROM once.queue_hint h WHERE h.queue = p_queue) < 32
        ON CONFLICT DO NOTHING;
    END IF;
    FOR v_priority IN SELECT h.priority FROM once.queue_hint h WHERE h.queue = p_queue LOOP
        PERFORM once.move_hint(p_queue, v_priority, p_full, p_last);
    END LOOP;
    SELECT * INTO STRICT v_mark FROM once.queue_mark m WHERE m.queue = p_queue;
    IF p_full THEN
        v_mark.due_low := '-infinity';
        v_mark.lease_low := '-infinity';
    END IF;
    SELECT least(v_late, min(f.available_at)) INTO v_mark.due_low FROM (
        SELECT j.available_at FROM once.job j
        WHERE j.queue = p_queue AND j.available_at >= v_mark.due_low
        ORDER BY j.available_at LIMIT 1) f;
    SELECT least(v_late, min(f.until)) INTO v_mark.lease_low FROM (
        (SELECT j.rescue_at AS until FROM once.job j
         WHERE j.queue = p_queue AND j.state = 'running' AND j.rescue_at >= v_mark.lease_low ORDER BY j.rescue_at LIMIT 1)
        UNION ALL
        (SELECT t.until FROM once.job_take t WHERE t.queue = p_queue AND t.until >= v_mark.lease_low ORDER BY t.until LIMIT 1)) f;
    UPDATE once.queue_mark m SET kept_at = p_started, due_low = v_mark.due_low, lease_low = v_mark.lease_low,
        looked_at = CASE WHEN p_full THEN p_started ELSE m.looked_at END,
        look_ms = CASE WHEN p_full THEN extract(epoch FROM once.clock() - p_started) * 1000 ELSE m.look_ms END
    WHERE m.queue = p_queue;
END $$;
