-- Headers that are not the emitter's to set: they pass for attributes of the event (a tenant, an id), steer a broker
-- (deduplication, routing), or frame a request. crates/pgonce-relay/src/envelope.rs has the same list; a test compares them.
CREATE OR REPLACE FUNCTION once.is_reserved_header(p_name text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT lower(p_name COLLATE "C") ~ '^(ce-|ce_|cloudevents|pgonce-|nats-|webhook-|proxy-)'
        OR lower(p_name COLLATE "C") = ANY (ARRAY['authorization', 'bcc', 'cc', 'connection', 'content-encoding', 'content-length',
            'content-type', 'cookie', 'expect', 'host', 'idempotency-key', 'keep-alive', 'payload', 'te', 'trailer',
            'transfer-encoding', 'upgrade', 'x-death', 'x-delay']) $$;
