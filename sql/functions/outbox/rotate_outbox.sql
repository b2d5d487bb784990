-- Turns to the next segment when it is time, and empties those that every sink is past and nobody wants to replay any
-- more. Called by relays now and then, and by pgonce purge; one at a time. Returns how many segments were emptied.
CREATE OR REPLACE FUNCTION once.rotate_outbox() RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_home once.outbox_home;
    v_turn bigint;
    v_used boolean;
    v_emptied int := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(7306, 3) THEN
        RETURN 0;
    END IF;
    PERFORM once.check_home();
    SELECT * INTO v_home FROM once.outbox_home;
    SELECT s.last_value >> 40 INTO v_turn FROM once.outbox_position s;
    FOR v_back IN 1..15 LOOP
        IF once.empty_segment(((v_turn + v_back) & 15)::int, v_home.retention) THEN
            v_emptied := v_emptied + 1;
        END IF;
    END LOOP;
    -- Fourteen turns make up the retention: the fifteenth segment is on its way out, the sixteenth is next.
    IF once.clock() - v_home.rotated_at >= greatest(v_home.retention / 14, interval '1 minute') THEN
        EXECUTE format('SELECT EXISTS (SELECT FROM once.outbox_%s)', v_turn & 15) INTO v_used;
        IF v_used THEN
            EXECUTE format('SELECT EXISTS (SELECT FROM once.outbox_%s)', (v_turn + 1) & 15) INTO v_used;
            IF NOT v_used THEN -- otherwise this segment simply goes on growing
                PERFORM setval('once.outbox_position', (v_turn + 1) << 40, false);
                UPDATE once.outbox_home SET rotated_at = once.clock();
            END IF;
        END IF;
    END IF;
    RETURN v_emptied;
END $$;
