-- Limits of what names an intent, and the scope's own key format. Messages never carry what was sent. Called only where no row answers yet:
-- a replay has passed it before.
CREATE OR REPLACE FUNCTION once.check_intent(
    p_tenant text, p_scope text, p_key text, p_fingerprint bytea, p_key_pattern text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_scope IS NULL OR octet_length(p_scope) NOT BETWEEN 1 AND 128 OR p_scope ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'scope is missing, longer than 128 bytes, or has control characters'
            USING ERRCODE = 'P4000', HINT = 'A scope names the operation, for example create_order.';
    END IF;
    IF p_tenant IS NULL OR octet_length(p_tenant) > 255 OR p_tenant ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'tenant is NULL, longer than 255 bytes, or has control characters'
            USING ERRCODE = 'P4004', HINT = 'Leave the tenant out where there is only one.';
    END IF;
    IF p_key IS NULL OR octet_length(p_key) NOT BETWEEN 1 AND 255 OR p_key ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'key is missing, longer than 255 bytes, or has control characters'
            USING ERRCODE = 'P4001', HINT = 'A key names the intent, not the attempt: the same for every retry.';
    END IF;
    IF p_fingerprint IS NULL OR octet_length(p_fingerprint) <> 32 THEN
        RAISE EXCEPTION 'fingerprint is missing or not 32 bytes'
            USING ERRCODE = 'P4003', HINT = 'once.fingerprint(payload) makes one.';
    END IF;
    IF p_key_pattern IS NOT NULL AND p_key !~ p_key_pattern THEN
        RAISE EXCEPTION 'key does not match the format that its scope declares'
            USING ERRCODE = 'P4001', HINT = 'See key_pattern in once.scopes.';
    END IF;
END $$;
