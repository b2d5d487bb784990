-- Moves the marks of where looks begin, about once a second a queue, by the take that did the upkeep (its lock is held).
-- A hint is the place of the first job that is ready (or being taken by this take), less some room for those that are being
-- added just now.
-- p_last: the last place given out before this take looked. At most 32 priorities have one.
CREATE OR REPLACE FUNCTION once.move_hints(p_queue int, p_full boolean, p_started timestamptz, p_last bigint, p_chosen tid[])
RETURNS void LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_room CONSTANT bigint := 2000;
    v_priority int;
    v_low bigint;
    v_first bigint;
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
    FOR v_priority, v_low IN SELECT h.priority, h.low FROM once.queue_hint h WHERE h.queue = p_queue LOOP
        SELECT j.position INTO v_first FROM once.job j
        WHERE j.queue = p_queue AND j.state = 'ready' AND j.priority = v_priority
          AND j.position >= CASE WHEN p_full THEN 0 ELSE v_low END
        ORDER BY j.priority DESC, j.position, j.id LIMIT 1;
        v_first := greatest(0, coalesce(v_first, p_last + 1) - v_room);
        IF v_first > v_low OR (p_full AND v_first < v_low) THEN
            UPDATE once.queue_hint h SET low = v_first WHERE h.queue = p_queue AND h.priority = v_priority;
        END IF;
    END LOOP;
    SELECT * INTO STRICT v_mark FROM once.queue_mark m WHERE m.queue = p_queue;
    IF p_full THEN
        v_mark.due_low := '-infinity';
        v_mark.lease_low := '-infinity';
    END IF;
    SELECT least(v_late, min(f.available_at)) INTO v_mark.due_low FROM (
        SELECT j.available_at FROM once.job j
        WHERE j.queue = p_queue AND j.state = 'delayed' AND j.available_at >= v_mark.due_low
        ORDER BY j.available_at LIMIT 1) f;
    SELECT least(v_late, min(f.leased_until)) INTO v_mark.lease_low FROM (
        SELECT j.leased_until FROM once.job j
        WHERE j.queue = p_queue AND j.state = 'running' AND j.leased_until >= v_mark.lease_low
        ORDER BY j.leased_until LIMIT 1) f;
    UPDATE once.queue_mark m SET kept_at = p_started, due_low = v_mark.due_low, lease_low = v_mark.lease_low,
        looked_at = CASE WHEN p_full THEN p_started ELSE m.looked_at END,
        look_ms = CASE WHEN p_full THEN extract(epoch FROM once.clock() - p_started) * 1000 ELSE m.look_ms END
    WHERE m.queue = p_queue;
END $$;
