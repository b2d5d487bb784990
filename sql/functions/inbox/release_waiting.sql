-- Lets messages go that wait for a version that is there now. The caller holds the entity's row.
CREATE OR REPLACE FUNCTION once.release_waiting(p_tenant text, p_consumer text, p_entity text, p_last bigint)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE once.inbox m SET state = 'received', next_at = once.clock()
        WHERE m.tenant = p_tenant AND m.consumer = p_consumer AND m.entity = p_entity AND m.version <= p_last + 1
          AND m.state = 'waiting';
END $$;
