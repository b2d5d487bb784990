-- The call that a notice is about, by our key or the provider's reference, locked; no row where it is not there, or not yet.
CREATE OR REPLACE FUNCTION once.find_notified(p_notice once.call_notice, p_wait boolean) RETURNS SETOF once.call LANGUAGE plpgsql VOLATILE ROWS 1 AS $$
DECLARE
    v_id uuid;
BEGIN
    IF p_notice.provider_key ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN
        SELECT c.id INTO v_id FROM once.call c WHERE c.id = p_notice.provider_key::uuid AND c.provider = p_notice.provider;
    END IF;
    IF v_id IS NULL AND p_notice.reference IS NOT NULL THEN
        SELECT c.id INTO v_id FROM once.call c WHERE c.provider = p_notice.provider AND c.reference = p_notice.reference
            ORDER BY c.requested_at DESC LIMIT 1;
    END IF;
    IF p_wait THEN
        RETURN QUERY SELECT * FROM once.call c WHERE c.id = v_id FOR UPDATE;
    ELSE
        RETURN QUERY SELECT * FROM once.call c WHERE c.id = v_id FOR UPDATE SKIP LOCKED;
    END IF;
END $$;
