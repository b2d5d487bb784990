-- Records how far a replay has come, fenced. p_done: whoever carries it out stops here, and another may go on at once.
CREATE OR REPLACE FUNCTION once.record_replay(p_id bigint, p_claim_id uuid, p_position bigint, p_sent bigint,
    p_done boolean DEFAULT false, p_lease interval DEFAULT '1 minute')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM once.check_flags(p_done);
    UPDATE once.outbox_replay r SET position = coalesce(p_position, r.position), sent = r.sent + p_sent,
        leased_until = CASE WHEN NOT p_done THEN once.clock() + p_lease END
    WHERE r.id = p_id AND r.claim_id = p_claim_id AND r.finished_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this replay is carried out by somebody else now' USING ERRCODE = 'P4071',
            DETAIL = 'What was sent may be sent again, under the same ids.', HINT = 'See once.outbox_replays.';
    END IF;
END $$;
