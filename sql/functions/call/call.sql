-- Records that a provider is to be called, in the caller's transaction: it is sent if and only if the caller commits, and
-- after that. Returns the call's id, which is the provider's idempotency key.
--
-- Where an intent is named, the id is derived from it, the provider, the operation and the ordinal: the same in every
-- attempt. Asking for the same again is no second call; asking for something else under the same name is an error.
CREATE OR REPLACE FUNCTION once.call(
    p_provider text, p_operation text, p_path text, p_body jsonb DEFAULT NULL, p_method text DEFAULT 'POST',
    p_headers jsonb DEFAULT NULL, p_scope text DEFAULT NULL, p_key text DEFAULT NULL, p_ordinal int DEFAULT 0,
    p_tenant text DEFAULT '', p_body_bytes bytea DEFAULT NULL, p_content_type text DEFAULT NULL,
    p_delay interval DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_key_header text;
    v_id uuid;
    v_now timestamptz := once.clock();
    v_body bytea := coalesce(p_body_bytes, convert_to(p_body::text, 'UTF8'));
    v_type text := coalesce(p_content_type, CASE WHEN p_body IS NOT NULL AND p_body_bytes IS NULL THEN 'application/json' END);
    v_hash bytea;
    v_call once.call;
BEGIN
    PERFORM once.check_provider_name(p_provider);
    SELECT p.key_header INTO v_key_header FROM once.provider p WHERE p.provider = p_provider;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the call cannot be made: nobody defined this provider' USING ERRCODE = 'P4063',
            DETAIL = 'Nothing was recorded, and nothing is sent.', HINT = 'once.define_provider declares it.';
    END IF;
    PERFORM once.check_call(p_operation, p_path, v_body, p_method, p_headers, v_type, p_scope, p_key, p_tenant, v_key_header);
    IF p_ordinal IS NULL OR p_ordinal < 0 OR p_delay NOT BETWEEN interval '0' AND interval '100 days' THEN
        RAISE EXCEPTION 'the call cannot be made: its ordinal is negative, or its delay is not 0 to 100 days' USING ERRCODE = 'P4063';
    END IF;
    v_hash := once.request_hash(p_method, p_path, p_headers, v_type, v_body);
    v_id := CASE WHEN p_key IS NULL THEN gen_random_uuid()
                 ELSE once.call_key(p_tenant, p_provider, p_scope, p_key, p_operation, p_ordinal) END;
    INSERT INTO once.call (id, ordinal, requested_at, next_at, provider, operation, tenant, scope, key, method, path, headers,
        content_type, body, request_hash)
    VALUES (v_id, p_ordinal, v_now, v_now + coalesce(p_delay, interval '0'), p_provider, p_operation, p_tenant, p_scope, p_key,
        p_method, p_path, p_headers, v_type, v_body, v_hash)
    ON CONFLICT (id) DO NOTHING RETURNING * INTO v_call;
    IF FOUND THEN
        -- Told before the call was here: not lost. What commits meanwhile is found when it is taken.
        PERFORM once.call_match(v_call);
    ELSIF NOT EXISTS (SELECT FROM once.call c WHERE c.id = v_id AND c.request_hash = v_hash) THEN
        RAISE EXCEPTION 'this call was asked for before with another request' USING ERRCODE = 'P4062',
            DETAIL = 'An intent makes one call of an operation; this one was not recorded.',
            HINT = 'Give each further call of the operation its own p_ordinal.';
    END IF;
    RETURN v_id;
END $$;
