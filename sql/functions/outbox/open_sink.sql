-- Names a sink and what it wants; a new one starts at the beginning of what is kept, or at now. Its lanes are made with it.
-- Narrower or wider wishes count from now on: what the cursor has passed is not looked at again.
CREATE OR REPLACE FUNCTION once.open_sink(p_sink text, p_topics text[] DEFAULT '{}', p_types text[] DEFAULT '{}',
    p_tenants text[] DEFAULT '{}', p_from_now boolean DEFAULT false)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_disabled text;
BEGIN
    PERFORM once.check_home();
    PERFORM once.check_flags(p_from_now);
    IF (octet_length(p_sink) BETWEEN 1 AND 255) IS NOT TRUE OR p_topics IS NULL OR p_types IS NULL OR p_tenants IS NULL
       OR cardinality(p_topics) + cardinality(p_types) + cardinality(p_tenants) > 1000 THEN
        RAISE EXCEPTION 'the sink''s name is missing or longer than 255 bytes, or it has more than 1000 filters'
            USING ERRCODE = 'P4040', HINT = 'Give it a short name that stays.';
    END IF;
    INSERT INTO once.sink (sink, topics, types, tenants) VALUES (p_sink, p_topics, p_types, p_tenants)
    ON CONFLICT (sink) DO UPDATE SET topics = excluded.topics, types = excluded.types, tenants = excluded.tenants
        WHERE (once.sink.topics, once.sink.types, once.sink.tenants) IS DISTINCT FROM (excluded.topics, excluded.types, excluded.tenants);
    INSERT INTO once.lane (sink, lane, delivered)
    SELECT p_sink, n, CASE WHEN p_from_now THEN pg_current_snapshot() ELSE '1:1:' END FROM generate_series(0, 7) n
    ON CONFLICT DO NOTHING;
    SELECT s.disabled INTO v_disabled FROM once.sink s WHERE s.sink = p_sink;
    RETURN v_disabled;
END $$;
