-- Waits until a rival has let go of the intent, or the deadline. True: look again; false: time is up,
-- or too many wait already. Nothing stays behind: locks and lock_timeout go with the subtransaction.
-- Waiters queue for the shared lock, so that all of them wake together when the rival is done.
CREATE OR REPLACE FUNCTION once.await_rival(
    p_lock bigint, p_leased boolean, p_deadline timestamptz, p_waiters_max int, p_look int)
RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_left_ms int := extract(epoch FROM p_deadline - clock_timestamp()) * 1000;
    v_slot int := 0;
BEGIN
    IF v_left_ms <= 0 THEN
        RETURN false;
    END IF;
    BEGIN
        -- One of a bounded number of places: a waiter holds a connection.
        LOOP
            EXIT WHEN v_slot >= p_waiters_max;
            EXIT WHEN pg_try_advisory_xact_lock(hashint8extended(p_lock, 1000 + v_slot));
            v_slot := v_slot + 1;
        END LOOP;
        IF v_slot >= p_waiters_max THEN
            RETURN false;
        END IF;
        IF p_leased THEN
            -- A lease's owner holds no lock that one could wait for: look now and then.
            PERFORM pg_sleep(least(v_left_ms, 5 * least(p_look, 20)) / 1000.0);
        ELSE
            PERFORM set_config('lock_timeout', v_left_ms::text, true);
            PERFORM pg_advisory_xact_lock_shared(p_lock);
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'P4100'; -- leave, giving back slot, lock and lock_timeout
    EXCEPTION
        WHEN SQLSTATE 'P4100' THEN NULL;
        WHEN lock_not_available THEN RETURN false;
    END;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- Our snapshot is older than what the rival did; only a new transaction can see it (trap 4).
        RAISE EXCEPTION 'the intent was being processed by another transaction'
            USING ERRCODE = '40001', HINT = 'Roll back and run the whole transaction again.';
    END IF;
    IF p_look > 1 AND NOT p_leased THEN
        PERFORM pg_sleep(random() * 0.005); -- a rolled-back rival wakes many at once: spread them
    END IF;
    RETURN true;
END $$;
