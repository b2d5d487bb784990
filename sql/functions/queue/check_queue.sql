-- Limits of what names a queue and its tenant.
CREATE OR REPLACE FUNCTION once.check_queue(p_tenant text, p_queue text) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_queue IS NULL OR octet_length(p_queue) NOT BETWEEN 1 AND 128 OR p_queue ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'queue is missing, longer than 128 bytes, or has control characters'
            USING ERRCODE = 'P4000', HINT = 'A queue names a kind of work, for example emails.';
    END IF;
    IF p_tenant IS NULL OR octet_length(p_tenant) > 255 OR p_tenant ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'tenant is NULL, longer than 255 bytes, or has control characters'
            USING ERRCODE = 'P4004', HINT = 'Leave the tenant out where there is only one.';
    END IF;
END $$;
