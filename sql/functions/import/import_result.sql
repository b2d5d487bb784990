-- What became of one row of a file: applied, skipped (with the reason) or failed (with the code). No row: not reached yet.
CREATE OR REPLACE FUNCTION once.import_result(p_job bigint, p_row bigint)
RETURNS TABLE (outcome text, reason text, message text, line bigint, at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT CASE WHEN f.row IS NOT NULL THEN 'failed' WHEN s.reason IS NOT NULL THEN 'skipped' ELSE 'applied' END,
           coalesce(f.code, s.reason), f.message, f.line, b.at
    FROM once.import_batch b
    CROSS JOIN LATERAL (SELECT CASE WHEN b.existing @> p_row THEN 'exists' WHEN b.unchanged @> p_row THEN 'unchanged'
                                    WHEN b.dropped @> p_row THEN 'dropped' END AS reason) s
    LEFT JOIN once.import_row f ON f.job = b.job AND f.row = p_row
    WHERE b.job = p_job AND b.first_row = (SELECT max(m.first_row) FROM once.import_batch m WHERE m.job = p_job AND m.first_row <= p_row)
      AND b.last_row >= p_row;
END $$;
