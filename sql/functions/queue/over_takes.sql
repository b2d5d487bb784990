-- Of takes whose lease is over, the jobs that nobody has ended, prolonged or put back, locked. A take of which nothing is
-- left is forgotten; one of which somebody has a job locked just now is looked at again a second later.
CREATE OR REPLACE FUNCTION once.over_takes(p_queue int, p_limit int, p_from timestamptz) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_take once.job_take;
    v_left bigint[];
    v_locked bigint[];
    v_over bigint[] := '{}';
BEGIN
    FOR v_take IN
        SELECT * FROM once.job_take t WHERE t.queue = p_queue AND t.until >= p_from AND t.until <= v_now
        ORDER BY t.until LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        -- By id alone: any other way to these rows is longer, whatever statistics of an emptied table say.
        v_left := ARRAY(SELECT l.id FROM unnest(v_take.ids) r CROSS JOIN LATERAL (
            SELECT j.id FROM once.job j
            WHERE j.id >= lower(r) AND j.id < upper(r) AND j.claim_id = v_take.claim_id AND j.rescue_at IS NULL OFFSET 0) l);
        v_locked := ARRAY(SELECT j.id FROM once.job j
            WHERE j.id = ANY (v_left) AND j.claim_id = v_take.claim_id AND j.rescue_at IS NULL FOR UPDATE SKIP LOCKED);
        v_over := v_over || v_locked;
        IF cardinality(v_locked) = cardinality(v_left) THEN
            DELETE FROM once.job_take t WHERE t.queue = p_queue AND t.until = v_take.until AND t.claim_id = v_take.claim_id;
        ELSE
            UPDATE once.job_take t SET until = v_now + interval '1 second'
                WHERE t.queue = p_queue AND t.until = v_take.until AND t.claim_id = v_take.claim_id;
        END IF;
        EXIT WHEN cardinality(v_over) >= p_limit;
    END LOOP;
    RETURN v_over;
END $$;
