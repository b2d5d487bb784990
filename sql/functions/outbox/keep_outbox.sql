-- How long delivered messages are kept for replay. Undelivered ones are kept whatever this says.
CREATE OR REPLACE FUNCTION once.keep_outbox(p_retention interval) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (p_retention BETWEEN interval '0' AND interval '10 years') IS NOT TRUE THEN
        RAISE EXCEPTION 'the retention is missing, negative or longer than 10 years' USING ERRCODE = 'P4020';
    END IF;
    UPDATE once.outbox_home SET retention = p_retention;
END $$;
