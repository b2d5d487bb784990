-- Moves a schedule from p_from (NULL: not computed yet) to its next time, and enqueues its job, in one transaction: of any
-- number of workers that try, one does. p_fire false: the time was missed and is passed over. Returns the job's id, or NULL.
CREATE OR REPLACE FUNCTION once.fire_schedule(
    p_schedule text, p_revision int, p_from timestamptz, p_next timestamptz, p_fire boolean DEFAULT true)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_schedule once.schedule;
    v_job bigint;
BEGIN
    IF p_next IS NULL OR p_next <= p_from THEN
        RAISE EXCEPTION 'a schedule moves forward' USING ERRCODE = 'P4020', HINT = 'Compute its next time after the last one.';
    END IF;
    UPDATE once.schedule s SET next_at = p_next
        WHERE s.schedule = p_schedule AND s.revision = p_revision AND s.next_at IS NOT DISTINCT FROM p_from AND NOT s.paused
          AND (p_from IS NULL OR p_from <= once.clock())
        RETURNING * INTO v_schedule;
    IF NOT FOUND OR p_from IS NULL OR p_fire IS NOT TRUE THEN
        RETURN NULL;
    END IF;
    v_job := once.enqueue(v_schedule.queue, v_schedule.payload, v_schedule.priority, p_attempts_max => v_schedule.attempts_max,
                          p_key => v_schedule.key, p_tenant => v_schedule.tenant);
    UPDATE once.schedule s SET last_at = p_from, last_job = v_job WHERE s.schedule = p_schedule;
    RETURN v_job;
END $$;
