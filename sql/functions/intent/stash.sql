-- Notes an atomic claim for as long as this transaction lives: what succeed and fail need to know, and the
-- proof that the claim was made here. It goes with a rollback, also with one to a savepoint, which gives
-- the advisory lock back too. An entry: claim id (36), lock key (16 hex), fingerprint (64 hex), then
-- retention, tombstone and response, each ended by |.
CREATE OR REPLACE FUNCTION once.stash(p_claim_id uuid, p_lock bigint, p_fingerprint bytea, p_policy once.scope)
RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT pg_catalog.set_config('once.claims', pg_catalog.concat(
        pg_catalog.current_setting('once.claims', true), p_claim_id, pg_catalog.lpad(pg_catalog.to_hex(p_lock), 16, '0'),
        pg_catalog.encode(p_fingerprint, 'hex'), p_policy.retention, '|', p_policy.tombstone, '|', p_policy.response, '|'), true) $$;
