-- What a provider tells by itself: a webhook, a line of a report. Each notice counts once; it settles the call in whatever
-- state that is, also before the call's own answer. One whose call is not there (yet) is kept, and applied when it is.
-- Call it in the transaction that takes the webhook in. Returns the call's state, or duplicate, or stored.
CREATE OR REPLACE FUNCTION once.call_notice(
    p_provider text, p_notice_id text, p_verdict text, p_provider_key text DEFAULT NULL, p_reference text DEFAULT NULL,
    p_body bytea DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_hash bytea := sha256(convert_to(jsonb_build_array(p_verdict, lower(p_provider_key), p_reference)::text, 'UTF8') || coalesce('\x01' || p_body, '\x00'));
    v_notice once.call_notice;
    v_call once.call;
BEGIN
    PERFORM once.check_provider_name(p_provider);
    PERFORM once.check_message(p_notice_id, v_hash);
    IF p_verdict IS NULL OR p_verdict NOT IN ('confirmed', 'failed', 'pending')
       OR coalesce(p_provider_key, p_reference) IS NULL OR octet_length(p_provider_key) NOT BETWEEN 1 AND 255
       OR octet_length(p_reference) NOT BETWEEN 1 AND 255 OR octet_length(p_body) > 1048576
       OR NOT EXISTS (SELECT FROM once.provider p WHERE p.provider = p_provider) THEN
        RAISE EXCEPTION 'the notice cannot be used' USING ERRCODE = 'P4063', HINT =
            'It says confirmed, failed or pending, names a call by key or reference, has at most 1 MiB, and its provider is defined.';
    END IF;
    INSERT INTO once.call_notice (provider, notice_id, received_at, look_at, provider_key, reference, verdict, content_hash, body)
    VALUES (p_provider, p_notice_id, once.clock(), once.clock() + interval '1 second', lower(p_provider_key), p_reference, p_verdict, v_hash, p_body)
    ON CONFLICT (provider, notice_id) DO NOTHING RETURNING * INTO v_notice;
    IF NOT FOUND THEN
        IF NOT EXISTS (SELECT FROM once.call_notice n WHERE n.provider = p_provider AND n.notice_id = p_notice_id AND n.content_hash = v_hash) THEN
            RAISE EXCEPTION 'this notice id was used before with another content' USING ERRCODE = 'P4050',
                DETAIL = 'The first one counts; this one was not applied.', HINT = 'Give every notice the id that its provider gave it.';
        END IF;
        RETURN 'duplicate';
    END IF;
    SELECT * INTO v_call FROM once.find_notified(v_notice, true);
    IF NOT FOUND THEN
        RETURN 'stored';
    END IF;
    RETURN once.apply_notice(v_notice, v_call);
END $$;
