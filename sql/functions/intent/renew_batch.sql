-- once.renew for many leases at once, each with its own verdict: renewed; settled (an outcome is recorded under
-- this very claim: nothing to renew, and nothing lost); busy (a transaction holds the row, most likely to complete
-- it: never waited for, trap 8); lost.
CREATE OR REPLACE FUNCTION once.renew_batch(
    p_tenants text[], p_scopes text[], p_keys text[], p_claim_ids uuid[], p_lease interval DEFAULT NULL)
RETURNS SETOF once.renewal_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_rows tid[];
    v_leases interval[];
    v_written int;
BEGIN
    PERFORM once.check_batch(cardinality(p_keys), once.shape(p_keys), once.shape(p_tenants), once.shape(p_scopes),
        once.shape(p_claim_ids));
    PERFORM once.override_policy(NULL::once.scope, NULL, p_lease, NULL); -- refuses a lease out of range
    WITH asked AS MATERIALIZED (
        SELECT a.* FROM unnest(p_tenants, p_scopes, p_keys, p_claim_ids)
            WITH ORDINALITY AS a (tenant, scope, key, claim_id, ordinal)
    ), rules AS MATERIALIZED (
        SELECT d.tenant, d.scope, p.lease
        FROM (SELECT DISTINCT a.tenant, a.scope FROM asked a) d CROSS JOIN LATERAL once.policy(d.tenant, d.scope) p
    ), locked AS MATERIALIZED (
        SELECT a.ordinal, a.tenant, a.scope, l.row
        FROM (SELECT * FROM asked a ORDER BY a.tenant COLLATE "C", a.scope COLLATE "C", a.key COLLATE "C" OFFSET 0) a
        LEFT JOIN LATERAL (
            SELECT i.ctid AS row FROM once.intent i
            WHERE i.tenant = a.tenant AND i.scope = a.scope AND i.key = a.key AND i.claim_id = a.claim_id
              AND i.locked_until > once.clock() -- and so processing: see intent_shape
            FOR UPDATE SKIP LOCKED) l ON true
    )
    SELECT array_agg(s.row), array_agg(s.lease) INTO v_rows, v_leases
    FROM (SELECT l.row, coalesce(p_lease, r.lease) AS lease
          FROM locked l LEFT JOIN rules r ON r.tenant = l.tenant AND r.scope = l.scope ORDER BY l.ordinal) s;

    UPDATE once.intent i SET locked_until = once.clock() + a.lease
    FROM unnest(v_rows, p_claim_ids, v_leases) AS a (row, claim_id, lease)
    WHERE i.ctid = a.row AND i.claim_id = a.claim_id;
    GET DIAGNOSTICS v_written = ROW_COUNT;
    IF v_written <> (SELECT count(DISTINCT r) FROM unnest(v_rows) r) THEN -- never `renewed` for what was not written
        RAISE EXCEPTION 'rows changed while they were locked' USING ERRCODE = '40001', HINT = 'Send the batch again.';
    END IF;

    RETURN QUERY
    SELECT a.ordinal::int,
        CASE WHEN a.row IS NOT NULL THEN 'renewed'
             WHEN i.status = 'processing' AND i.locked_until > once.clock() THEN 'busy'
             WHEN i.status <> 'processing' THEN 'settled'
             ELSE 'lost' END,
        CASE WHEN a.row IS NOT NULL THEN i.locked_until END,
        CASE WHEN a.row IS NOT NULL THEN (date_part('epoch', a.lease) * 1000)::bigint END
    FROM unnest(p_tenants, p_scopes, p_keys, p_claim_ids, v_rows, v_leases)
        WITH ORDINALITY AS a (tenant, scope, key, claim_id, row, lease, ordinal)
    LEFT JOIN LATERAL (
        SELECT * FROM once.intent i
        WHERE i.tenant = a.tenant AND i.scope = a.scope AND i.key = a.key AND i.claim_id = a.claim_id OFFSET 0) i ON true;
END $$;
