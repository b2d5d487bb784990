-- Forgets imports that ended longer ago than that, with what became of their rows: at most so many records a call, and
-- a job last. The rows that they applied are the application's, and stay. A file that was forgotten is new again; what it
-- brings is then told from what is there by the natural key. Returns how many records went.
CREATE OR REPLACE FUNCTION once.purge_imports(p_limit int DEFAULT 10000, p_retention interval DEFAULT '90 days')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job bigint;
    v_gone bigint := 0;
    v_count bigint;
BEGIN
    IF (p_limit BETWEEN 1 AND 1000000) IS NOT TRUE OR (p_retention >= interval '0') IS NOT TRUE THEN
        RAISE EXCEPTION 'limit or retention out of range' USING ERRCODE = 'P4080', HINT = 'Purge 1 to 1,000,000 records; a retention is not negative.';
    END IF;
    LOOP
        SELECT j.id INTO v_job FROM once.import_job j
        WHERE j.state IN ('done', 'abandoned') AND j.ended_at < once.clock() - p_retention
        ORDER BY j.ended_at LIMIT 1 FOR UPDATE SKIP LOCKED;
        EXIT WHEN NOT FOUND OR v_gone >= p_limit;
        DELETE FROM once.import_row r WHERE r.job = v_job AND r.row IN (
            SELECT o.row FROM once.import_row o WHERE o.job = v_job LIMIT p_limit - v_gone);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_gone := v_gone + v_count;
        DELETE FROM once.import_batch b WHERE b.job = v_job AND b.first_row IN (
            SELECT o.first_row FROM once.import_batch o WHERE o.job = v_job LIMIT p_limit - v_gone);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_gone := v_gone + v_count;
        EXIT WHEN v_gone >= p_limit;
        DELETE FROM once.import_job j WHERE j.id = v_job;
        v_gone := v_gone + 1;
    END LOOP;
    RETURN v_gone;
END $$;
