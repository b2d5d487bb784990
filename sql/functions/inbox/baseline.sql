-- Sets the last version of an entity, for a consumer that starts from a snapshot: never backwards. Returns the last
-- version that counts now.
CREATE OR REPLACE FUNCTION once.baseline(p_consumer text, p_entity text, p_version bigint, p_tenant text DEFAULT '')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_last bigint;
BEGIN
    PERFORM once.check_version(p_tenant, p_consumer, p_entity, p_version);
    v_last := once.lock_entity(p_tenant, p_consumer, p_entity);
    IF p_version <= v_last THEN
        RETURN v_last;
    END IF;
    UPDATE once.entity_version e SET last = p_version, at = once.clock()
        WHERE e.tenant = p_tenant AND e.consumer = p_consumer AND e.entity = p_entity;
    PERFORM once.release_waiting(p_tenant, p_consumer, p_entity, p_version);
    RETURN p_version;
END $$;
