-- Keeps the file's first line with its import, for what is written back.
CREATE OR REPLACE FUNCTION once.import_header(p_job bigint, p_claim_id uuid, p_header bytea)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE once.import_job j SET header = p_header WHERE j.id = p_job AND j.claim_id = p_claim_id AND j.state = 'running';
    IF NOT FOUND THEN
        PERFORM once.import_lost();
    END IF;
END $$;
