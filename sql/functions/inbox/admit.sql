-- Whether this delivery of a message is the first: 'new' or 'duplicate'. Call it in the transaction of the effect, which
-- happens only for 'new': both commit, or neither does. A rival that is at the same message is waited for; then it is
-- 'duplicate', or 'new' where the rival rolled back. With a snapshot too old to see the rival's row, ON CONFLICT
-- raises 40001: run the whole transaction again. A duplicate writes nothing.
CREATE OR REPLACE FUNCTION once.admit(
    p_consumer text, p_source text, p_message_id text, p_body_hash bytea, p_tenant text DEFAULT '')
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_stream int;
    v_hash bytea;
BEGIN
    IF once.message_fits(p_message_id, p_body_hash) IS NOT TRUE THEN
        PERFORM once.check_message(p_message_id, p_body_hash);
    END IF;
    SELECT s.id INTO v_stream FROM once.inbox_stream s
        WHERE s.tenant = p_tenant AND s.consumer = p_consumer AND s.source = p_source;
    IF NOT FOUND THEN
        v_stream := once.stream_id(p_tenant, p_consumer, p_source);
    END IF;
    LOOP
        INSERT INTO once.admitted (at, stream, message_id, body_hash)
            VALUES (once.clock(), v_stream, p_message_id, p_body_hash) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN 'new';
        END IF;
        -- A statement of its own: its snapshot is younger than the rival's commit.
        SELECT a.body_hash INTO v_hash FROM once.admitted a WHERE a.stream = v_stream AND a.message_id = p_message_id;
        EXIT WHEN FOUND; -- else purge came between
    END LOOP;
    IF v_hash <> p_body_hash THEN
        RAISE EXCEPTION 'the message id was used before with another body' USING ERRCODE = 'P4050',
            DETAIL = 'This delivery is not a duplicate of the first, and was not applied.',
            HINT = 'Ids must be unique at their source: ask the producer, and do not apply it.';
    END IF;
    RETURN 'duplicate';
END $$;
