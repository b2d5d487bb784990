-- The stash entry of an atomic claim that this transaction made for this intent and still holds; NULL if
-- it did not. See once.stash for its parts.
CREATE OR REPLACE FUNCTION once.stashed(p_claim_id uuid, p_lock bigint) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_stash text := current_setting('once.claims', true);
    v_at int := coalesce(strpos(v_stash, p_claim_id::text), 0); -- never NULL: NULL AND … goes on to the lock
BEGIN
    IF v_at > 0 AND substr(v_stash, v_at + 36, 16) = lpad(to_hex(p_lock), 16, '0')
       AND pg_try_advisory_xact_lock(p_lock) THEN -- ours already: the lock came and goes with the entry
        RETURN split_part(substr(v_stash, v_at), '|', 1) || '|' || split_part(substr(v_stash, v_at), '|', 2)
            || '|' || split_part(substr(v_stash, v_at), '|', 3) || '|';
    END IF;
    RETURN NULL;
END $$;
