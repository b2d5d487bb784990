-- The failures of the caller's import, in the order of the file, after a row: a page at a time. Operators read
-- once.import_errors.
CREATE OR REPLACE FUNCTION once.import_failures(p_job bigint, p_claim_id uuid, p_after bigint DEFAULT 0, p_limit int DEFAULT 1000)
RETURNS TABLE ("row" bigint, line bigint, code text, message text, input bytea)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM once.import_job j WHERE j.id = p_job AND j.claim_id = p_claim_id) THEN
        PERFORM once.import_lost();
    END IF;
    RETURN QUERY SELECT r.row, r.line, r.code, r.message, r.input FROM once.import_row r
        WHERE r.job = p_job AND r.row > p_after ORDER BY r.row LIMIT p_limit;
END $$;
