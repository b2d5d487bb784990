-- Whether a version of an entity is the next: 'apply' (it is the last one's plus one, or the first, 0 or 1, of an unknown
-- entity; it is the last now), 'stale' (it, or a later one, was applied before), or 'gap' (one before it is missing;
-- the last stays). The entity's row is locked to the end of the transaction. 'apply' releases the message of the
-- stored inbox that waits for it.
CREATE OR REPLACE FUNCTION once.advance(p_consumer text, p_entity text, p_version bigint, p_tenant text DEFAULT '')
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_last bigint;
BEGIN
    PERFORM once.check_version(p_tenant, p_consumer, p_entity, p_version);
    UPDATE once.entity_version e SET last = p_version, at = once.clock()
        WHERE e.tenant = p_tenant AND e.consumer = p_consumer AND e.entity = p_entity AND e.last = p_version - 1;
    IF NOT FOUND THEN
        -- Not the next by what was visible: a rival may be moving it this moment, and is waited for.
        v_last := once.lock_entity(p_tenant, p_consumer, p_entity);
        IF p_version <= v_last THEN
            RETURN 'stale';
        ELSIF p_version > coalesce(v_last, 0) + 1 THEN
            RETURN 'gap';
        END IF;
        UPDATE once.entity_version e SET last = p_version, at = once.clock()
            WHERE e.tenant = p_tenant AND e.consumer = p_consumer AND e.entity = p_entity;
    END IF;
    PERFORM once.release_waiting(p_tenant, p_consumer, p_entity, p_version);
    RETURN 'apply';
END $$;
