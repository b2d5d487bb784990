-- Removes calls that were settled longer ago than their provider's retention, with their evidence, and notices that never
-- found a call. Never one that is not settled. At most p_limit of each, skipping locked ones; returns how many went, call
-- it until 0. A call that is gone is not known any more: keep calls for longer than their intents.
CREATE OR REPLACE FUNCTION once.purge_calls(p_limit int DEFAULT 10000)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_limit int := greatest(0, least(p_limit, 100000));
    v_calls bigint;
    v_notices bigint;
BEGIN
    DELETE FROM once.call d WHERE d.id = ANY (ARRAY(
        SELECT c.id FROM once.call c JOIN once.provider p ON p.provider = c.provider
        WHERE c.settled_at IS NOT NULL AND c.settled_at <= v_now - p.retention
        ORDER BY c.settled_at LIMIT v_limit FOR UPDATE OF c SKIP LOCKED));
    GET DIAGNOSTICS v_calls = ROW_COUNT;
    DELETE FROM once.call_notice d USING once.provider p WHERE p.provider = d.provider AND d.call_id IS NULL
        AND d.received_at <= v_now - p.retention AND (d.provider, d.notice_id) IN (
            SELECT n.provider, n.notice_id FROM once.call_notice n WHERE n.call_id IS NULL
            ORDER BY n.look_at LIMIT v_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_notices = ROW_COUNT;
    RETURN v_calls + v_notices;
END $$;
