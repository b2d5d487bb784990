-- Removes what its consumer's retention is over for: dedup rows, and stored messages that are processed. Never a message
-- that is not: failed_final ones wait for somebody. At most p_limit of each kind, skipping locked ones; returns how many
-- went, call it until 0. Dedup rows go about oldest first: they lie in the order of arrival, and sorting all that are
-- due for every batch would cost more than the batch.
CREATE OR REPLACE FUNCTION once.purge_inbox(p_limit int DEFAULT 10000)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_limit int := greatest(0, least(p_limit, 100000));
    v_streams int[];
    v_cuts timestamptz[];
    v_newest timestamptz;
    v_admitted bigint;
    v_stored bigint;
BEGIN
    SELECT array_agg(s.id), array_agg(v_now - p.retention), max(v_now - p.retention) INTO v_streams, v_cuts, v_newest
        FROM once.inbox_stream s CROSS JOIN LATERAL once.consumer_policy(s.tenant, s.consumer) p
        WHERE p.retention IS NOT NULL;
    DELETE FROM once.admitted d WHERE d.ctid = ANY (ARRAY(
        SELECT a.ctid FROM once.admitted a JOIN unnest(v_streams, v_cuts) c (stream, cut) ON c.stream = a.stream
        WHERE a.at <= v_newest AND a.at <= c.cut LIMIT v_limit FOR UPDATE OF a SKIP LOCKED));
    GET DIAGNOSTICS v_admitted = ROW_COUNT;
    DELETE FROM once.inbox d WHERE d.id = ANY (ARRAY(
        SELECT m.id FROM once.inbox m CROSS JOIN LATERAL once.consumer_policy(m.tenant, m.consumer) p
        WHERE m.state = 'processed' AND m.finished_at IS NOT NULL AND m.finished_at <= v_now - p.retention
        ORDER BY m.finished_at LIMIT v_limit FOR UPDATE OF m SKIP LOCKED));
    GET DIAGNOSTICS v_stored = ROW_COUNT;
    RETURN v_admitted + v_stored;
END $$;
