-- Ends a replay that nobody wants to go on with: what it has not sent is not sent, and nothing is kept for it. Audited.
CREATE OR REPLACE FUNCTION once.abandon_replay(p_id bigint, p_actor text, p_reason text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM once.check_operator(p_actor, p_reason);
    UPDATE once.outbox_replay r SET finished_at = once.clock(), claim_id = NULL, leased_until = NULL
    WHERE r.id = p_id AND r.finished_at IS NULL;
    IF FOUND THEN
        INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
        VALUES (p_actor, 'outbox:abandon_replay', '', 'outbox', 'replay ' || p_id, p_reason);
        RETURN true;
    END IF;
    RETURN false;
END $$;
