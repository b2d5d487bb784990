-- Ends a schedule; jobs that it enqueued stay. False: there was none.
CREATE OR REPLACE FUNCTION once.drop_schedule(p_schedule text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM once.schedule s WHERE s.schedule = p_schedule;
    RETURN FOUND;
END $$;
