-- This database is the log's home from now on.
CREATE OR REPLACE FUNCTION once.settle_home() RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE once.outbox_home SET system_identifier = c.system_identifier, database_oid = d.oid
    FROM pg_control_system() c, pg_database d WHERE d.datname = current_database();
END $$;
