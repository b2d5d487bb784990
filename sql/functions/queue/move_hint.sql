-- Moves the hint of a priority; the lock of the queue's upkeep is held. A hint is the place of the first job that is ready
-- (or being taken by this take), less some room for those that are being added just now.
CREATE OR REPLACE FUNCTION once.move_hint(p_queue int, p_priority int, p_full boolean, p_last bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_room CONSTANT bigint := 2000;
    v_low bigint;
    v_first bigint;
BEGIN
    SELECT h.low INTO STRICT v_low FROM once.queue_hint h WHERE h.queue = p_queue AND h.priority = p_priority;
    SELECT j.position INTO v_first FROM once.job j
    WHERE j.queue = p_queue AND j.state = 'ready' AND j.claim_id IS NULL AND j.priority = p_priority
      AND j.position >= CASE WHEN p_full THEN 0 ELSE v_low END
    ORDER BY j.priority DESC, j.position, j.id LIMIT 1;
    v_first := greatest(0, coalesce(v_first, p_last + 1) - v_room);
    IF v_first > v_low OR (p_full AND v_first < v_low) THEN
        UPDATE once.queue_hint h SET low = v_first WHERE h.queue = p_queue AND h.priority = p_priority;
    END IF;
END $$;
