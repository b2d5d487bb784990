-- Who may do what in the ledger: run last. PUBLIC has nothing; tables are nobody's but the owner's.
DO $$
DECLARE
    v_app text[] := ARRAY['open_account', 'post', 'post_batch', 'reverse', 'format_amount'];
    v_ops text[] := ARRAY['open_account', 'set_overdraft', 'define_currency', 'reverse', 'verify', 'format_amount'];
    v_views text[] := ARRAY['accounts', 'postings', 'entries', 'migrations'];
    v_role text;
    v_signature text;
    v_view text;
BEGIN
    REVOKE ALL ON SCHEMA once_ledger FROM PUBLIC;
    REVOKE ALL ON ALL FUNCTIONS IN SCHEMA once_ledger FROM PUBLIC;
    REVOKE ALL ON ALL TABLES IN SCHEMA once_ledger FROM PUBLIC;
    REVOKE ALL ON ALL SEQUENCES IN SCHEMA once_ledger FROM PUBLIC;
    FOR v_role IN SELECT r.rolname FROM pg_catalog.pg_roles r WHERE r.rolname IN ('once_app', 'once_ops', 'once_reader') LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA once_ledger TO %I', v_role);
        FOR v_signature IN
            SELECT p.oid::regprocedure::text FROM pg_catalog.pg_proc p
            WHERE p.pronamespace = 'once_ledger'::regnamespace
              AND ((v_role = 'once_app' AND p.proname = ANY (v_app)) OR (v_role = 'once_ops' AND p.proname = ANY (v_ops))
                   OR (v_role = 'once_reader' AND p.proname IN ('verify', 'format_amount')))
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', v_signature, v_role);
        END LOOP;
        IF v_role IN ('once_ops', 'once_reader') THEN
            FOREACH v_view IN ARRAY v_views LOOP
                EXECUTE format('GRANT SELECT ON once_ledger.%I TO %I', v_view, v_role);
            END LOOP;
        END IF;
    END LOOP;
END $$;
