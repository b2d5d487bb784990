-- The one function that moves a call from state to state, and writes whatever else changed with it. The diagram is in
-- docs/guides/calls.md. The caller holds the row.
CREATE OR REPLACE FUNCTION once.call_move(p_old once.call, p_new once.call) RETURNS once.call_state LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF (CASE p_old.state
            WHEN 'requested' THEN p_new.state IN ('sent', 'unknown', 'confirmed', 'failed', 'escalated')
            WHEN 'sent' THEN p_new.state IN ('requested', 'unknown', 'confirmed', 'failed', 'escalated')
            WHEN 'unknown' THEN p_new.state IN ('requested', 'confirmed', 'failed', 'escalated')
            WHEN 'escalated' THEN p_new.state IN ('requested', 'unknown', 'confirmed', 'failed')
            -- Never from one verdict to the other, and never back: a contradiction is a person's to settle.
            ELSE p_new.state = 'escalated' AND p_new.contradicted
        END) IS NOT TRUE AND p_old.state <> p_new.state THEN
        RAISE EXCEPTION 'a call does not go from % to %', p_old.state, p_new.state USING ERRCODE = 'P4099',
            HINT = 'pgonce calls show tells what is known of it.';
    END IF;
    UPDATE once.call c SET
        state = p_new.state, doubted = p_new.doubted, contradicted = p_new.contradicted, attempts = p_new.attempts,
        asked = p_new.asked, next_at = p_new.next_at, sent_at = p_new.sent_at, unknown_since = p_new.unknown_since,
        settled_at = p_new.settled_at, leased_until = p_new.leased_until, claim_id = p_new.claim_id,
        settled_as = p_new.settled_as, worker = p_new.worker, reference = p_new.reference, last_note = left(p_new.last_note, 2000)
    WHERE c.id = p_old.id;
    RETURN p_new.state;
END $$;
