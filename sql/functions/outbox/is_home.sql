-- Whether this database is the one in which the log was made.
CREATE OR REPLACE FUNCTION once.is_home() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM once.outbox_home h, pg_control_system() c, pg_database d
                   WHERE d.datname = current_database() AND h.system_identifier = c.system_identifier AND h.database_oid = d.oid);
END $$;
