-- Schedules whose time has come, or whose next time must be computed; with the time by which to compute.
CREATE OR REPLACE FUNCTION once.due_schedules(p_limit int DEFAULT 100)
RETURNS TABLE (schedule text, revision int, cron text, timezone text, missed text, next_at timestamptz, now timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := once.clock();
BEGIN
    RETURN QUERY SELECT s.schedule, s.revision, s.cron, s.timezone, s.missed, s.next_at, v_now FROM once.schedule s
    WHERE NOT s.paused AND s.last_error IS NULL AND (s.next_at IS NULL OR s.next_at <= v_now)
    ORDER BY s.next_at LIMIT greatest(0, least(p_limit, 1000));
END $$;
