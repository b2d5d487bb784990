-- Run first by every migrate. Makes the roles where that is allowed; where it is not, an administrator can
-- run these lines once, and the next migrate uses them:
--   CREATE ROLE once_owner NOLOGIN;  CREATE ROLE once_app NOLOGIN;
--   CREATE ROLE once_ops NOLOGIN;    CREATE ROLE once_reader NOLOGIN;
--   CREATE ROLE once_direct NOLOGIN; CREATE ROLE once_relay NOLOGIN;
--   GRANT once_owner TO <the role that migrates>;
DO $$
DECLARE
    v_role text;
    -- From PostgreSQL 16 on, who makes a role is its administrator, and a member, but may not become it.
    v_become text := CASE WHEN current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END;
BEGIN
    FOREACH v_role IN ARRAY ARRAY['once_owner', 'once_app', 'once_ops', 'once_reader', 'once_direct', 'once_relay'] LOOP
        IF NOT EXISTS (SELECT 1 FROM pg_catalog.pg_roles r WHERE r.rolname = v_role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
            EXCEPTION
                WHEN insufficient_privilege THEN NULL; -- doctor tells
                WHEN duplicate_object OR unique_violation THEN NULL; -- another database's migrate, just now
            END;
        END IF;
    END LOOP;
    IF EXISTS (SELECT 1 FROM pg_catalog.pg_roles r WHERE r.rolname = 'once_owner')
       AND NOT pg_has_role(current_user, 'once_owner', v_become) THEN
        BEGIN
            EXECUTE format('GRANT once_owner TO %I', current_user);
        EXCEPTION WHEN insufficient_privilege THEN NULL;
        END;
    END IF;
    IF to_regnamespace('once') IS NULL THEN
        IF EXISTS (SELECT 1 FROM pg_catalog.pg_roles r WHERE r.rolname = 'once_owner')
           AND pg_has_role(current_user, 'once_owner', v_become) THEN
            CREATE SCHEMA once AUTHORIZATION once_owner;
        ELSE
            CREATE SCHEMA once;
        END IF;
    END IF;
    -- Everything below belongs to the schema's owner, whoever migrates.
    EXECUTE format('SET LOCAL ROLE %I', (SELECT pg_get_userbyid(n.nspowner) FROM pg_catalog.pg_namespace n WHERE n.nspname = 'once'));
END $$;
CREATE TABLE IF NOT EXISTS once.migration (
    version    int PRIMARY KEY,
    name       text NOT NULL,
    checksum   text NOT NULL,
    breaking   boolean NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by text NOT NULL DEFAULT session_user
);
