-- What a claim would observe, without claiming anything and without writing: for pollers and for callers
-- that expect a replay. kind is NULL where a claim could own the intent.
CREATE OR REPLACE FUNCTION once.peek(p_scope text, p_key text, p_fingerprint bytea, p_tenant text DEFAULT '')
RETURNS once.claim_result
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row once.intent;
BEGIN
    IF octet_length(p_fingerprint) IS DISTINCT FROM 32 THEN -- NULL would be no other payload, and be shown the answer
        RAISE EXCEPTION 'fingerprint is missing or not 32 bytes'
            USING ERRCODE = 'P4003', HINT = 'once.fingerprint(payload) makes one.';
    END IF;
    SELECT * INTO v_row FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
    IF FOUND THEN
        RETURN once.observe(v_row, p_fingerprint);
    END IF;
    RETURN NULL;
END $$;
