-- Removes what its consumer's retention is over for: dedup rows, and stored messages that are processed. Never a message
-- that is not: failed_final ones wait for somebody. At most p_limit of each kind, skipping locked ones; returns how many
-- went, call it until 0.
CREATE OR REPLACE FUNCTION once.purge_inbox(p_limit int DEFAULT 10000)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_limit int := greatest(0, least(p_limit, 100000));
    v_admitted bigint := once.purge_admitted(v_limit);
    v_stored bigint;
BEGIN
    DELETE FROM once.inbox d WHERE d.id = ANY (ARRAY(
        SELECT m.id FROM once.inbox m CROSS JOIN LATERAL once.consumer_policy(m.tenant, m.consumer) p
        WHERE m.state = 'processed' AND m.finished_at IS NOT NULL AND m.finished_at <= v_now - p.retention
        ORDER BY m.finished_at LIMIT v_limit FOR UPDATE OF m SKIP LOCKED));
    GET DIAGNOSTICS v_stored = ROW_COUNT;
    RETURN v_admitted + v_stored;
END $$;
