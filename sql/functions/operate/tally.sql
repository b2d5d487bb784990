-- Adds up how often each kind of answer was given. Replays write nothing, so whoever wants them counted
-- collects and flushes: the Rust crate does, every few seconds. p_counts: {"kind": how many, …}.
CREATE OR REPLACE FUNCTION once.tally(p_scope text, p_counts jsonb, p_tenant text DEFAULT '') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM once.check_intent(p_tenant, p_scope, 'key', sha256(''), NULL);
    INSERT INTO once.tally_day (day, tenant, scope, kind, count)
    SELECT (once.clock() AT TIME ZONE 'UTC')::date, p_tenant, p_scope, left(e.key, 40), e.value::bigint
    FROM jsonb_each_text(p_counts) e WHERE e.value ~ '^[0-9]{1,15}$' ORDER BY e.key
    ON CONFLICT (day, tenant, scope, kind) DO UPDATE SET count = once.tally_day.count + excluded.count;
END $$;
