-- An operator lets parked messages be tried again, or lets them go for good (p_discard): audited, with a reason. p_position
-- NULL: all parked ones of the sink. Returns how many.
CREATE OR REPLACE FUNCTION once.resume_held(p_sink text, p_position bigint, p_actor text, p_reason text,
    p_discard boolean DEFAULT false)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row once.held;
    v_count int := 0;
BEGIN
    PERFORM once.check_flags(p_discard);
    PERFORM once.check_operator(p_actor, p_reason);
    FOR v_row IN
        SELECT h.* FROM once.held h
        WHERE h.sink = p_sink AND h.state = 'parked' AND (p_position IS NULL OR h.position = p_position)
        ORDER BY h.position FOR UPDATE
    LOOP
        IF p_discard THEN
            DELETE FROM once.held h WHERE h.sink = p_sink AND h.position = v_row.position;
            PERFORM once.wake_held(p_sink, v_row.tenant, v_row.lane_key);
        ELSE
            UPDATE once.held h SET state = 'failing', attempts = 0, next_at = once.clock()
            WHERE h.sink = p_sink AND h.position = v_row.position;
        END IF;
        INSERT INTO once.audit (actor, action, tenant, scope, key, from_status, to_status, reason)
        VALUES (p_actor, CASE WHEN p_discard THEN 'outbox:discard' ELSE 'outbox:resume' END, v_row.tenant, 'outbox',
            p_sink || ' ' || v_row.message_id, 'parked', CASE WHEN p_discard THEN 'discarded' ELSE 'failing' END, p_reason);
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;
