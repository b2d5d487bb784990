-- Limits of what names a stream: tenant, consumer and source.
CREATE OR REPLACE FUNCTION once.check_stream(p_tenant text, p_consumer text, p_source text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_consumer IS NULL OR octet_length(p_consumer) NOT BETWEEN 1 AND 128 OR p_consumer ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'consumer is missing, longer than 128 bytes, or has control characters'
            USING ERRCODE = 'P4000', HINT = 'A consumer names who applies the messages, for example billing.';
    END IF;
    IF p_source IS NULL OR octet_length(p_source) NOT BETWEEN 1 AND 255 OR p_source ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'source is missing, longer than 255 bytes, or has control characters'
            USING ERRCODE = 'P4000', HINT = 'A source names where message ids are unique, for example nats:ORDERS.';
    END IF;
    IF p_tenant IS NULL OR octet_length(p_tenant) > 255 OR p_tenant ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'tenant is NULL, longer than 255 bytes, or has control characters'
            USING ERRCODE = 'P4004', HINT = 'Leave the tenant out where there is only one.';
    END IF;
END $$;
