-- Records that an attempt failed and may go better: call it after the rollback, in a transaction of its own. Again after
-- p_delay, or after the queue's backoff, doubled with every attempt and shortened by chance by up to a half. A job of a
-- key keeps its place: those behind it wait. Where the attempts are used up it is buried, where it was asked to stop it is
-- cancelled. Returns what it is now: delayed, ready, buried or cancelled.
CREATE OR REPLACE FUNCTION once.retry(p_job_id bigint, p_claim_id uuid, p_error text DEFAULT NULL, p_delay interval DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job once.job := once.hold_job(p_job_id, p_claim_id);
    v_queue once.queue;
    v_delay interval := p_delay;
BEGIN
    IF (p_delay BETWEEN interval '0' AND interval '1000 days') IS FALSE THEN
        RAISE EXCEPTION 'delay out of range' USING ERRCODE = 'P4020', HINT = 'A delay is 0 to 1000 days.';
    END IF;
    IF v_job.cancel THEN
        PERFORM once.end_jobs(ARRAY[p_job_id], 'cancelled', p_error);
        RETURN 'cancelled';
    END IF;
    IF v_job.attempts >= v_job.attempts_max THEN
        PERFORM once.end_jobs(ARRAY[p_job_id], 'buried',
            format('its %s attempts are used up; last error: %s', v_job.attempts, coalesce(p_error, 'not told')));
        RETURN 'buried';
    END IF;
    IF v_delay IS NULL THEN
        SELECT * INTO STRICT v_queue FROM once.queue q WHERE q.id = v_job.queue;
        v_delay := (0.5 + random() / 2) * least(v_queue.backoff_max, v_queue.backoff * power(2, least(v_job.attempts - 1, 30)));
    END IF;
    PERFORM once.put_back(v_job, v_job.attempts, v_delay, left(p_error, 2000));
    RETURN CASE WHEN v_delay > interval '0' THEN 'delayed' ELSE 'ready' END;
END $$;
