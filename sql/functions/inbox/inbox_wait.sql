-- Parks a message that came before its turn (once.advance said 'gap') until the missing version is applied, at most for
-- the consumer's gap_max. The attempt does not count. Where the missing one was applied meanwhile, the message is received
-- again at once. Returns the new state. The entity's row is locked first, as in once.advance: see once.lock_entity.
CREATE OR REPLACE FUNCTION once.inbox_wait(p_id bigint, p_claim_id uuid)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_message once.inbox;
    v_policy once.consumer;
    v_last bigint;
    v_state once.inbox_state;
BEGIN
    SELECT * INTO v_message FROM once.inbox m
        WHERE m.id = p_id AND m.claim_id = p_claim_id AND m.state = 'processing';
    IF NOT FOUND THEN
        PERFORM once.inbox_lost();
    ELSIF v_message.version IS NULL THEN
        RAISE EXCEPTION 'a message without a version waits for nothing' USING ERRCODE = 'P4020',
            HINT = 'Store entity and version with it, or call once.inbox_fail.';
    END IF;
    v_last := once.lock_entity(v_message.tenant, v_message.consumer, v_message.entity);
    v_state := CASE WHEN v_message.version > coalesce(v_last, 0) + 1 THEN 'waiting' ELSE 'received' END;
    SELECT * INTO v_policy FROM once.consumer_policy(v_message.tenant, v_message.consumer);
    UPDATE once.inbox m SET state = v_state, leased_until = NULL, attempts = m.attempts - 1,
        next_at = once.clock() + CASE v_state WHEN 'waiting' THEN v_policy.gap_max ELSE interval '0' END
    WHERE m.id = p_id AND m.claim_id = p_claim_id AND m.state = 'processing';
    IF NOT FOUND THEN
        PERFORM once.inbox_lost();
    END IF;
    RETURN v_state::text;
END $$;
