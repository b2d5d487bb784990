-- once.take, for callers that sort what they get, by priority (the higher first), place and id: for thousands of jobs,
-- with all that is in them, that is cheaper where they end up. Here they come as their rows lie.
CREATE OR REPLACE FUNCTION once.take_unsorted(
    p_queue text, p_worker text DEFAULT NULL, p_limit int DEFAULT 1, p_lease interval DEFAULT NULL, p_tenant text DEFAULT NULL)
RETURNS TABLE (id bigint, claim_id uuid, tenant text, key text, priority int, payload jsonb, attempts int, attempts_max int,
               enqueued_at timestamptz, place bigint, leased_until timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_queue once.queue;
    v_chosen record;
    v_tids tid[];
    v_claim uuid := gen_random_uuid();
    v_until timestamptz;
    v_leave boolean; -- they leave their line at once
BEGIN
    PERFORM once.check_take(p_queue, p_worker, p_limit, p_lease, p_tenant);
    SELECT * INTO v_queue FROM once.queue q WHERE q.queue = p_queue AND p_queue <> '';
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO v_chosen FROM once.choose_jobs(v_queue, p_tenant, p_limit);
    v_tids := v_chosen.tids;
    IF cardinality(v_tids) = 0 THEN
        RETURN;
    END IF;
    v_until := once.clock() + coalesce(p_lease, v_queue.lease);
    -- Small takes are of slow jobs: others should not walk over those, and a note for each take would be more work.
    v_leave := v_queue.running_max IS NOT NULL OR cardinality(v_tids) < 100;
    IF NOT v_leave THEN
        PERFORM once.note_take(v_queue.id, v_until, v_claim, v_chosen.seen);
    END IF;
    -- One that stays in its line is changed on its page: no index is written. Straight from the rows into the result: each
    -- further step, such as a WITH or a sort, would copy every payload once more.
    RETURN QUERY
    UPDATE once.job j SET
        state = CASE WHEN v_leave OR j.key IS NOT NULL THEN 'running' ELSE j.state END,
        rescue_at = CASE WHEN v_leave OR j.key IS NOT NULL THEN v_until END,
        attempts = j.attempts + 1, claim_id = v_claim, worker = p_worker, leased_until = v_until
    WHERE j.ctid = ANY (v_tids)
    RETURNING j.id, v_claim, j.tenant, j.key, j.priority, j.payload, j.attempts, j.attempts_max, j.enqueued_at, j.position, v_until;
END $$;
