-- Puts messages back to received, with no attempts counted, so that they are processed again without their broker: by
-- their ids, or by states (failed_final if none are named) and when they came. Not what is received or processing. Audited.
-- A processed message's effect happens again: replay those only where that converges (docs/guides/inbox.md).
CREATE OR REPLACE FUNCTION once.inbox_replay(
    p_consumer text, p_actor text, p_reason text, p_ids bigint[] DEFAULT NULL, p_states text[] DEFAULT NULL,
    p_from timestamptz DEFAULT NULL, p_to timestamptz DEFAULT NULL, p_dry_run boolean DEFAULT false,
    p_limit int DEFAULT 1000, p_tenant text DEFAULT NULL)
RETURNS TABLE (id bigint, tenant text, source text, message_id text, from_state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_states text[] := coalesce(p_states, CASE WHEN p_ids IS NULL THEN ARRAY['failed_final'] END,
                                ARRAY['failed_final', 'failed_retryable', 'waiting', 'processed']);
BEGIN
    PERFORM once.check_flags(p_dry_run);
    PERFORM once.check_decision(p_actor, p_reason);
    IF NOT v_states <@ ARRAY['failed_final', 'failed_retryable', 'waiting', 'processed'] OR cardinality(p_ids) > 10000 THEN
        RAISE EXCEPTION 'no such states can be replayed, or more than 10000 ids' USING ERRCODE = 'P4020',
            HINT = 'States are failed_final, failed_retryable, waiting and processed.';
    END IF;
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT m.id, m.tenant, m.consumer, m.source, m.message_id, m.state, m.claim_id FROM once.inbox m
        WHERE m.consumer = p_consumer AND (p_tenant IS NULL OR m.tenant = p_tenant)
          AND (p_ids IS NULL OR m.id = ANY (p_ids)) AND m.state::text = ANY (v_states)
          AND (p_from IS NULL OR m.received_at >= p_from) AND (p_to IS NULL OR m.received_at < p_to)
        ORDER BY m.id LIMIT greatest(0, least(p_limit, 10000)) FOR UPDATE
    ), put_back AS (
        UPDATE once.inbox m SET state = 'received', attempts = 0, next_at = once.clock(), finished_at = NULL,
            result = NULL, result_type = NULL, result_id = NULL, last_error = NULL
        FROM picked p WHERE m.id = p.id AND NOT p_dry_run
    ), told AS (
        INSERT INTO once.audit (actor, action, tenant, scope, key, from_status, to_status, from_claim, reason)
        SELECT p_actor, 'inbox_replay', p.tenant, p.consumer, p.message_id, p.state::text, 'received', p.claim_id, p_reason
        FROM picked p WHERE NOT p_dry_run
    )
    SELECT p.id, p.tenant::text, p.source::text, p.message_id::text, p.state::text FROM picked p ORDER BY p.id;
END $$;
