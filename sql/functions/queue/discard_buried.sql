-- Removes buried jobs for good, by their ids or oldest first: nobody will do them. Audited.
CREATE OR REPLACE FUNCTION once.discard_buried(
    p_queue text, p_actor text, p_reason text, p_ids bigint[] DEFAULT NULL, p_limit int DEFAULT 1000, p_tenant text DEFAULT NULL)
RETURNS TABLE (id bigint, tenant text, last_error text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_gone once.job_ended[] := once.dig_up(p_queue, p_actor, p_reason, p_ids, p_limit, p_tenant, 'discard_buried');
BEGIN
    RETURN QUERY SELECT g.id, g.tenant, g.last_error FROM unnest(v_gone) g ORDER BY g.id;
END $$;
