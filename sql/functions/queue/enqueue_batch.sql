-- once.enqueue for many jobs of one queue: an array of ids, in the order given. The other arrays have an element for every
-- job (NULL where it has none), or are left out. Jobs with unique keys are added in the order of those keys, so that two
-- batches with the same ones wait, and never deadlock.
CREATE OR REPLACE FUNCTION once.enqueue_batch(
    p_queue text, p_payloads jsonb[], p_priorities int[] DEFAULT NULL, p_available_ats timestamptz[] DEFAULT NULL,
    p_unique_keys text[] DEFAULT NULL, p_attempts_max int DEFAULT NULL, p_keys text[] DEFAULT NULL,
    p_unique_scope text DEFAULT NULL, p_unique_window interval DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS bigint[] LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count int := once.check_parallel(cardinality(p_payloads), once.shape(p_payloads), once.shape(p_priorities),
        once.shape(p_available_ats), once.shape(p_unique_keys), once.shape(p_keys));
    v_id int;
    v_queue once.queue;
    v_now timestamptz := once.clock();
    v_ids bigint[];
BEGIN
    PERFORM once.check_queue(p_tenant, p_queue);
    PERFORM once.check_job('{}', 0, NULL, NULL, p_attempts_max, NULL);
    v_id := once.queue_id(p_queue); -- a statement of its own: the next one sees the row
    SELECT * INTO v_queue FROM once.queue q WHERE q.id = v_id;
    PERFORM once.check_job(j.payload, coalesce(j.priority, 0), j.available_at, j.unique_key, NULL, j.key)
        FROM unnest(p_payloads, p_priorities, p_available_ats, p_unique_keys, p_keys) j (payload, priority, available_at, unique_key, key)
        WHERE j.payload IS NULL OR pg_column_size(j.payload) > 1048576 OR j.available_at IS NOT NULL
           OR j.unique_key IS NOT NULL OR j.key IS NOT NULL;
    IF p_unique_keys IS NOT NULL AND EXISTS (SELECT FROM unnest(p_unique_keys) u WHERE u IS NOT NULL) THEN
        SELECT array_agg(e.id ORDER BY e.place) INTO v_ids FROM (
            SELECT s.place, once.enqueue(p_queue, s.payload, coalesce(s.priority, 0), s.available_at, s.unique_key,
                p_attempts_max, s.key, p_unique_scope, p_unique_window, p_tenant) AS id
            FROM (SELECT * FROM unnest(p_payloads, p_priorities, p_available_ats, p_unique_keys, p_keys)
                      WITH ORDINALITY j (payload, priority, available_at, unique_key, key, place)
                  ORDER BY j.unique_key COLLATE "C" NULLS FIRST, j.place) s
            OFFSET 0) e;
        RETURN coalesce(v_ids, '{}');
    END IF;
    WITH added AS (
        INSERT INTO once.job (id, position, enqueued_at, available_at, queue, priority, attempts_max, state, tenant, key, payload)
        SELECT n.id, n.id, v_now, CASE WHEN n.available_at > v_now THEN n.available_at END, v_queue.id,
               coalesce(n.priority, 0), coalesce(p_attempts_max, v_queue.attempts_max),
               CASE WHEN n.available_at > v_now THEN 'delayed' ELSE 'ready' END::once.job_state, p_tenant, n.key, n.payload
        FROM (SELECT nextval('once.job_id') AS id, j.*
              FROM unnest(p_payloads, p_priorities, p_available_ats, p_keys) j (payload, priority, available_at, key)
              OFFSET 0) n
        RETURNING id
    )
    SELECT coalesce(array_agg(a.id), '{}') INTO v_ids FROM added a;
    RETURN v_ids;
END $$;
