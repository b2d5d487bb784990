-- The number of a stream, given at its first message. Two first messages at once: the second waits for the first's
-- commit, as the messages themselves would; with a snapshot too old to see the number, ON CONFLICT raises 40001.
CREATE OR REPLACE FUNCTION once.stream_id(p_tenant text, p_consumer text, p_source text) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_id int;
BEGIN
    LOOP
        SELECT s.id INTO v_id FROM once.inbox_stream s
            WHERE s.tenant = p_tenant AND s.consumer = p_consumer AND s.source = p_source;
        IF FOUND THEN
            RETURN v_id;
        END IF;
        PERFORM once.check_stream(p_tenant, p_consumer, p_source);
        INSERT INTO once.inbox_stream (tenant, consumer, source) VALUES (p_tenant, p_consumer, p_source)
            ON CONFLICT DO NOTHING RETURNING id INTO v_id;
        IF FOUND THEN
            RETURN v_id;
        END IF;
    END LOOP;
END $$;
