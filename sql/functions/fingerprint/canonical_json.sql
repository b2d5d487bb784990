-- The one text of a JSON value (RFC 8785, JCS): no spaces, object keys in the order of their UTF-16 code
-- units, numbers as ECMAScript prints the nearest double. Whoever sent it, in whatever order, spelling or
-- language, two equal payloads give equal bytes, so a retry is told from another intent.
-- Settings of the session must not change it: the ones that could are pinned here, for all helpers below.
-- The order of keys is only right in UTF8; in a database of another encoding, what is not ASCII is refused
-- rather than given a fingerprint that no other client would compute. SECURITY DEFINER: helpers are private.
-- Nesting is bounded by max_stack_depth: too deep raises PostgreSQL's own 54001.
CREATE OR REPLACE FUNCTION once.canonical_json(p_value jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1 AS $$
BEGIN
    IF getdatabaseencoding() <> 'UTF8' AND p_value::text ~ E'[^\\u0001-\\u007f]' THEN
        RAISE EXCEPTION 'payload has characters beyond ASCII, and the encoding of this database is not UTF8'
            USING ERRCODE = 'P4003', HINT = 'Send the bytes to once.fingerprint_bytes, or use a UTF8 database.';
    END IF;
    RETURN once.canonical_node(p_value);
END $$;
