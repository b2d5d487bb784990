-- Lets go of messages that will never be applied, so that their keys go on: failed_final and waiting ones become
-- processed, with the result failed_final. Audited.
CREATE OR REPLACE FUNCTION once.inbox_discard(p_consumer text, p_ids bigint[], p_actor text, p_reason text)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count int;
BEGIN
    PERFORM once.check_decision(p_actor, p_reason);
    IF p_ids IS NULL OR cardinality(p_ids) > 10000 THEN
        RAISE EXCEPTION 'the ids are missing, or more than 10000' USING ERRCODE = 'P4020';
    END IF;
    WITH picked AS MATERIALIZED (
        SELECT m.id, m.tenant, m.consumer, m.message_id, m.state, m.claim_id FROM once.inbox m
        WHERE m.consumer = p_consumer AND m.id = ANY (p_ids) AND m.state IN ('failed_final', 'waiting')
        ORDER BY m.id FOR UPDATE
    ), let_go AS (
        UPDATE once.inbox m SET state = 'processed', result = 'failed_final', finished_at = once.clock()
        FROM picked p WHERE m.id = p.id
    )
    INSERT INTO once.audit (actor, action, tenant, scope, key, from_status, to_status, from_claim, reason)
    SELECT p_actor, 'inbox_discard', p.tenant, p.consumer, p.message_id, p.state::text, 'processed', p.claim_id, p_reason
    FROM picked p;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;
