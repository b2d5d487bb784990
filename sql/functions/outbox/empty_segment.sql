-- Truncates a segment if all of it was delivered to every sink, and is past its retention. Nobody waits: where somebody
-- uses it, another time. The check is made again under the lock: a writer that was open before it is seen then (I13).
CREATE OR REPLACE FUNCTION once.empty_segment(p_segment int, p_retention interval) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_due boolean;
    v_question text := format($q$
        SELECT EXISTS (SELECT FROM once.outbox_%1$s) AND EXISTS (SELECT FROM once.sink)
           AND (SELECT o.at FROM once.outbox_%1$s o ORDER BY o.xid DESC LIMIT 1) <= once.clock() - $1
           AND NOT EXISTS (
               SELECT FROM (SELECT DISTINCT l.delivered::text AS d FROM once.lane l) l
               WHERE EXISTS (SELECT FROM once.outbox_%1$s o WHERE o.xid >= pg_snapshot_xmax(l.d::pg_snapshot))
                  OR EXISTS (SELECT FROM pg_snapshot_xip(l.d::pg_snapshot) x JOIN once.outbox_%1$s o ON o.xid = x))
           AND NOT EXISTS (SELECT FROM once.outbox_replay r WHERE r.finished_at IS NULL)$q$, p_segment);
BEGIN
    EXECUTE v_question INTO v_due USING p_retention;
    IF NOT v_due THEN
        RETURN false;
    END IF;
    EXECUTE format('LOCK TABLE ONLY once.outbox_%s IN ACCESS EXCLUSIVE MODE NOWAIT', p_segment);
    EXECUTE v_question INTO v_due USING p_retention;
    IF v_due THEN
        EXECUTE format('TRUNCATE ONLY once.outbox_%s', p_segment);
    END IF;
    RETURN v_due;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;
