-- Removes dedup rows whose consumer's retention is over: at most p_limit, skipping locked ones. Rows lie about in the order of
-- arrival; once.admitted_range says which stretches of the table have something to remove, and is brought up to date here.
-- A row that comes into a stretch later, also for a consumer that has none yet, cannot expire before its own retention
-- is over: so a stretch needs no look until then. Whatever else may have happened, each gets one a day.
CREATE OR REPLACE FUNCTION once.purge_admitted(p_limit int) RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    c_pages CONSTANT int := 128;
    v_now timestamptz := once.clock();
    v_streams int[];
    v_keeps interval[];
    v_again timestamptz;
    v_range int := -1;
    v_from tid;
    v_to tid;
    v_some bigint;
    v_gone bigint := 0;
BEGIN
    SELECT array_agg(s.id), array_agg(p.retention) INTO v_streams, v_keeps
        FROM once.inbox_stream s CROSS JOIN LATERAL once.consumer_policy(s.tenant, s.consumer) p
        WHERE p.retention IS NOT NULL;
    SELECT v_now + least(min(c.retention), interval '1 day') INTO v_again FROM once.consumer c;
    INSERT INTO once.admitted_range (number, due)
        SELECT n, '-infinity' FROM generate_series(
            coalesce((SELECT max(r.number) + 1 FROM once.admitted_range r), 0),
            (pg_relation_size('once.admitted') / current_setting('block_size')::int / c_pages)::int) n
        ON CONFLICT DO NOTHING;
    WHILE v_gone < p_limit LOOP
        SELECT r.number INTO v_range FROM once.admitted_range r
            WHERE r.due <= v_now AND r.number > v_range ORDER BY r.number LIMIT 1 FOR UPDATE SKIP LOCKED;
        EXIT WHEN NOT FOUND;
        v_from := format('(%s,0)', v_range::bigint * c_pages)::tid;
        v_to := format('(%s,0)', (v_range::bigint + 1) * c_pages)::tid;
        DELETE FROM once.admitted d WHERE d.ctid = ANY (ARRAY(
            SELECT a.ctid FROM once.admitted a JOIN unnest(v_streams, v_keeps) k (stream, keep) ON k.stream = a.stream
            WHERE a.ctid >= v_from AND a.ctid < v_to AND a.at + k.keep <= v_now
            LIMIT p_limit - v_gone FOR UPDATE OF a SKIP LOCKED));
        GET DIAGNOSTICS v_some = ROW_COUNT;
        v_gone := v_gone + v_some;
        -- What was locked, or beyond the limit, is still there, and keeps the stretch due.
        UPDATE once.admitted_range r SET due = least(v_again, (
            SELECT min(a.at + k.keep) FROM once.admitted a JOIN unnest(v_streams, v_keeps) k (stream, keep) ON k.stream = a.stream
            WHERE a.ctid >= v_from AND a.ctid < v_to))
            WHERE r.number = v_range;
    END LOOP;
    RETURN v_gone;
END $$;
