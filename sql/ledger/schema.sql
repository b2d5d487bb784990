-- Run first where the ledger is installed or brought up to date: the schema once_ledger, with the owner of once.
RESET ROLE; -- who migrates may make a schema; who owns one may not
DO $$
DECLARE
    v_owner name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_catalog.pg_namespace n WHERE n.nspname = 'once');
BEGIN
    IF to_regnamespace('once_ledger') IS NULL THEN
        EXECUTE format('CREATE SCHEMA once_ledger AUTHORIZATION %I', v_owner);
    END IF;
    EXECUTE format('SET LOCAL ROLE %I', v_owner);
END $$;
CREATE TABLE IF NOT EXISTS once_ledger.migration (LIKE once.migration INCLUDING ALL);
