-- Removes what is over: rows past their window, oldest first, at most p_limit, skipping locked ones.
-- Processing and uncertain rows have no expiry and are never touched. A row with a tombstone loses its
-- answer first and goes when the tombstone ends. Returns how many rows were dealt with; call until 0.
CREATE OR REPLACE FUNCTION once.purge(p_limit int DEFAULT 10000, p_archive boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    PERFORM once.check_flags(p_archive);
    IF p_archive THEN
        PERFORM once.ensure_history_partition(once.clock());
        INSERT INTO once.intent_history (archived_at, tenant, scope, key, record)
        SELECT once.clock(), r ->> 'tenant', r ->> 'scope', r ->> 'key', r
        FROM once.purge_rows(p_limit) r;
        GET DIAGNOSTICS v_count = ROW_COUNT;
    ELSE
        SELECT count(*) INTO v_count FROM once.purge_rows(p_limit, false);
    END IF;
    PERFORM once.sample_size();
    RETURN v_count;
END $$;
