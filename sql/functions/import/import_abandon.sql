-- Lets an import go that nobody will resume: what it applied stays, and the same file starts anew. Not while it runs. Audited.
CREATE OR REPLACE FUNCTION once.import_abandon(p_job bigint, p_actor text, p_reason text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_tenant text;
BEGIN
    PERFORM once.check_operator(p_actor, p_reason);
    UPDATE once.import_job j SET state = 'abandoned', leased_until = NULL, ended_at = once.clock(), updated_at = once.clock(),
        claim_id = gen_random_uuid()
    WHERE j.id = p_job AND (j.state = 'stopped' OR (j.state = 'running' AND j.leased_until <= once.clock()))
    RETURNING j.tenant INTO v_tenant;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
    VALUES (p_actor, 'import:abandon', v_tenant, 'import', 'job ' || p_job, p_reason);
    RETURN true;
END $$;
