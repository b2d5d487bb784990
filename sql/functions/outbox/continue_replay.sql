-- A replay's next messages, for whoever carries it out: one at a time, by lease. No row: nothing is left, and it is finished.
CREATE OR REPLACE FUNCTION once.continue_replay(p_id bigint, p_sink text, p_claim_id uuid, p_limit int DEFAULT 100000,
    p_lease interval DEFAULT '1 minute')
RETURNS TABLE ("position" bigint, xid bigint, rate int) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_replay once.outbox_replay;
BEGIN
    PERFORM once.check_home();
    UPDATE once.outbox_replay r SET claim_id = p_claim_id, leased_until = once.clock() + p_lease
    WHERE r.id = p_id AND r.sink = p_sink AND r.finished_at IS NULL
      AND (r.claim_id = p_claim_id OR r.leased_until IS NULL OR r.leased_until <= once.clock())
    RETURNING r.* INTO v_replay;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this replay is finished, is not this sink''s, or is being carried out by somebody else' USING ERRCODE = 'P4071',
            DETAIL = 'Nothing was sent by this call.', HINT = 'See once.outbox_replays; one that was left goes on when its lease is over.';
    END IF;
    RETURN QUERY
    SELECT w.position, w.xid::text::bigint, v_replay.rate
    FROM once.replayable(v_replay.sink, v_replay.selection, v_replay.position) w
    WHERE w.position <= v_replay.upto ORDER BY w.position LIMIT least(greatest(p_limit, 1), 1000000);
    IF NOT FOUND THEN
        UPDATE once.outbox_replay r SET finished_at = once.clock(), leased_until = NULL WHERE r.id = p_id;
    END IF;
END $$;
