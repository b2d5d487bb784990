-- What pins an intent's payload: 32 bytes, the same for the same JSON in any spelling (once.canonical_json),
-- and the same as the Rust crate computes. Operation and version are part of it, so that a key used again
-- for another operation or API version is a conflict.
CREATE OR REPLACE FUNCTION once.fingerprint(p_payload jsonb, p_operation text DEFAULT '', p_version text DEFAULT '')
RETURNS bytea LANGUAGE plpgsql IMMUTABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN once.fingerprint_bytes(convert_to(once.canonical_json(p_payload), 'UTF8'), p_operation, p_version);
END $$;
