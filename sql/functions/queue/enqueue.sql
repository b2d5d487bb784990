-- Adds a job, in the caller's transaction: it is there if and only if that commits. Returns its id; where the unique key
-- is taken, the id of the job that has it, and nothing is added. Nothing is locked but a unique key.
-- p_key: jobs of one key run one after another (or the queue's key_running_max at once), in the order in which they were
-- enqueued. p_unique_scope: waiting (until it is taken), alive (until it has ended), window (for p_unique_window);
-- NULL: as the queue says.
CREATE OR REPLACE FUNCTION once.enqueue(
    p_queue text, p_payload jsonb, p_priority int DEFAULT 0, p_available_at timestamptz DEFAULT NULL,
    p_unique_key text DEFAULT NULL, p_attempts_max int DEFAULT NULL, p_key text DEFAULT NULL,
    p_unique_scope text DEFAULT NULL, p_unique_window interval DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_queue once.queue;
    v_id bigint;
    v_now timestamptz := once.clock();
    v_scope once.unique_scope;
    v_delayed boolean := coalesce(p_available_at > v_now, false);
BEGIN
    PERFORM once.check_queue(p_tenant, p_queue);
    PERFORM once.check_job(p_payload, p_priority, p_available_at, p_unique_key, p_attempts_max, p_key);
    SELECT * INTO v_queue FROM once.queue q WHERE q.queue = p_queue;
    IF NOT FOUND THEN
        v_id := once.queue_id(p_queue); -- a statement of its own: the next one sees the row
        SELECT * INTO v_queue FROM once.queue q WHERE q.id = v_id;
    END IF;
    v_id := nextval('once.job_id');
    IF p_unique_key IS NOT NULL THEN
        v_scope := once.check_unique(v_queue.unique_scope, p_unique_scope, p_unique_window);
        v_id := once.reserve_unique(v_queue.id, p_tenant, p_unique_key, v_scope, v_id,
                                    coalesce(p_unique_window, v_queue.unique_window));
        IF v_id < 0 THEN
            RETURN -v_id;
        END IF;
    END IF;
    INSERT INTO once.job (id, position, enqueued_at, available_at, queue, priority, attempts_max, state, unique_scope,
                          tenant, key, unique_key, payload)
    VALUES (v_id, v_id, v_now, CASE WHEN v_delayed THEN p_available_at END, v_queue.id, p_priority,
            coalesce(p_attempts_max, v_queue.attempts_max),
            CASE WHEN v_delayed THEN 'delayed' ELSE 'ready' END::once.job_state, v_scope, p_tenant, p_key, p_unique_key,
            p_payload);
    RETURN v_id;
END $$;
