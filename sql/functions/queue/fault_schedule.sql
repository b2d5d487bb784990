-- Records that no next time can be computed for a schedule: its cron expression is none, or never comes. It rests until it
-- is defined anew.
CREATE OR REPLACE FUNCTION once.fault_schedule(p_schedule text, p_revision int, p_error text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE once.schedule s SET last_error = left(p_error, 500) WHERE s.schedule = p_schedule AND s.revision = p_revision;
END $$;
