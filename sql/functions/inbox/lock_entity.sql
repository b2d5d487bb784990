-- Locks the row of an entity, made where there is none, to the end of the transaction, and returns the last version
-- applied; NULL: none. Whoever answers 'gap' holds the row: a rival that applies the missing version comes before, and
-- is seen, or after, and sees who waits for it. With an older snapshot the rival's row raises 40001.
CREATE OR REPLACE FUNCTION once.lock_entity(p_tenant text, p_consumer text, p_entity text) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_last bigint;
BEGIN
    LOOP
        SELECT e.last INTO v_last FROM once.entity_version e
            WHERE e.tenant = p_tenant AND e.consumer = p_consumer AND e.entity = p_entity FOR UPDATE;
        IF FOUND THEN
            RETURN v_last;
        END IF;
        INSERT INTO once.entity_version (last, at, tenant, consumer, entity)
            VALUES (NULL, once.clock(), p_tenant, p_consumer, p_entity) ON CONFLICT DO NOTHING;
    END LOOP;
END $$;
