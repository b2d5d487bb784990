-- A running job, locked by the caller, runs no more: it is ready again, or after a delay.
CREATE OR REPLACE FUNCTION once.put_back(p_job once.job, p_attempts int, p_delay interval, p_error text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_later boolean := p_delay > interval '0';
BEGIN
    UPDATE once.job j SET state = CASE WHEN NOT v_later THEN 'ready' WHEN p_attempts > 0 THEN 'retrying' ELSE 'delayed' END::once.job_state,
        available_at = CASE WHEN v_later THEN once.clock() + p_delay END, attempts = p_attempts, leased_until = NULL,
        rescue_at = NULL, claim_id = NULL, last_error = coalesce(p_error, j.last_error),
        position = once.front(j.queue, j.priority, j.position)
    WHERE j.id = p_job.id;
    -- One that was enqueued for later, and came due while this one ran, may stand before it.
    IF p_job.key IS NOT NULL THEN
        PERFORM once.wake_keys(ARRAY[p_job.queue], ARRAY[p_job.tenant], ARRAY[p_job.key]);
    END IF;
END $$;
