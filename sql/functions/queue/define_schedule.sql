-- Declares that a job is enqueued at set times. p_cron is read by workers (five fields, or six with seconds first), in
-- p_timezone. Options: priority, attempts_max, key, missed ("one": the times that passed while no worker ran are made up for
-- by one job; "skip": not at all), paused. Calling it again replaces the rules, with the same ones it writes nothing.
CREATE OR REPLACE FUNCTION once.define_schedule(
    p_schedule text, p_queue text, p_cron text, p_payload jsonb DEFAULT '{}', p_timezone text DEFAULT 'UTC',
    p_options jsonb DEFAULT '{}', p_tenant text DEFAULT '')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_new once.schedule;
    v_name text;
    v_value jsonb;
BEGIN
    PERFORM once.check_queue(p_tenant, p_queue);
    PERFORM once.check_queue('', p_schedule);
    IF p_options IS NULL OR jsonb_typeof(p_options) <> 'object'
       OR (p_cron ~ '^\S{1,100}( +\S{1,100}){4,5}$') IS NOT TRUE THEN
        RAISE EXCEPTION 'a schedule has a cron expression of five or six fields, and options that are a JSON object'
            USING ERRCODE = 'P4020', HINT = 'For example 0 6 * * MON-FRI.';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_timezone_names z WHERE z.name = p_timezone) THEN
        RAISE EXCEPTION 'no such time zone' USING ERRCODE = 'P4020', HINT = 'For example UTC or Europe/Berlin.';
    END IF;
    v_new.missed := 'one';
    v_new.priority := 0;
    v_new.paused := false;
    FOR v_name, v_value IN SELECT * FROM jsonb_each(p_options) LOOP
        CASE v_name
        WHEN 'priority' THEN v_new.priority := once.policy_number(v_name, v_value, 0, 1000000);
        WHEN 'attempts_max' THEN v_new.attempts_max := once.policy_number(v_name, v_value, 1, 1000000);
        WHEN 'key' THEN v_new.key := once.policy_text(v_name, v_value, NULL);
        WHEN 'missed' THEN v_new.missed := once.policy_text(v_name, v_value, ARRAY['one', 'skip']);
        WHEN 'paused' THEN v_new.paused := once.policy_text(v_name, to_jsonb(v_value #>> '{}'), ARRAY['true', 'false'])::boolean;
        ELSE
            RAISE EXCEPTION 'unknown option %', quote_literal(left(v_name, 40))
                USING ERRCODE = 'P4020', HINT = 'docs/reference/sql.md lists the options of schedules.';
        END CASE;
    END LOOP;
    PERFORM once.check_job(p_payload, v_new.priority, NULL, NULL, v_new.attempts_max, v_new.key);
    INSERT INTO once.schedule AS s (schedule, queue, cron, timezone, payload, priority, attempts_max, key, tenant, missed, paused)
    VALUES (p_schedule, p_queue, p_cron, p_timezone, p_payload, v_new.priority, v_new.attempts_max, v_new.key, p_tenant,
            v_new.missed, v_new.paused)
    ON CONFLICT (schedule) DO UPDATE SET queue = excluded.queue, cron = excluded.cron, timezone = excluded.timezone,
        payload = excluded.payload, priority = excluded.priority, attempts_max = excluded.attempts_max, key = excluded.key,
        tenant = excluded.tenant, missed = excluded.missed, paused = excluded.paused, revision = s.revision + 1,
        -- Other times: computed anew. Else the next one stays, or a restart would lose it.
        next_at = CASE WHEN (s.cron, s.timezone, s.paused) = (excluded.cron, excluded.timezone, excluded.paused) THEN s.next_at END,
        last_error = NULL, updated_at = once.clock()
    WHERE (s.queue, s.cron, s.timezone, s.payload, s.priority, s.attempts_max, s.key, s.tenant, s.missed, s.paused)
        IS DISTINCT FROM (excluded.queue, excluded.cron, excluded.timezone, excluded.payload, excluded.priority,
                          excluded.attempts_max, excluded.key, excluded.tenant, excluded.missed, excluded.paused);
END $$;
