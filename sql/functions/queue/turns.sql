-- Of picked jobs, the places of those that may be handed out: whose turn it is in their key, and whose unique key, where
-- it is theirs only while they wait, is free to go: somebody who just got this job's id for it has not committed yet, and
-- what that transaction wrote must be there when the job runs.
CREATE OR REPLACE FUNCTION once.turns(p_queue once.queue, p_ids bigint[], p_limit int) RETURNS tid[]
LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off AS $$
DECLARE
    v_ids bigint[] := p_ids;
    v_held bigint[] := ARRAY(SELECT j.id FROM unnest(p_ids) p (id) JOIN once.job j ON j.id = p.id WHERE j.unique_scope = 'waiting');
    v_gone bigint[];
    v_turns bigint[];
BEGIN
    IF cardinality(v_held) > 0 THEN
        v_gone := ARRAY(
            SELECT u.job_id FROM unnest(v_held) p (id) JOIN once.job j ON j.id = p.id
            JOIN once.job_unique u ON u.queue = j.queue AND u.tenant = j.tenant AND u.unique_key = j.unique_key AND u.job_id = j.id
            FOR UPDATE OF u SKIP LOCKED);
        -- Those that have no row any more (taken before, and tried again) hold nothing.
        v_ids := ARRAY(SELECT p.id FROM unnest(p_ids) WITH ORDINALITY p (id, place)
            WHERE p.id <> ALL (v_held) OR p.id = ANY (v_gone) OR NOT EXISTS (
                SELECT FROM once.job j JOIN once.job_unique u ON u.queue = j.queue AND u.tenant = j.tenant
                    AND u.unique_key = j.unique_key AND u.job_id = j.id WHERE j.id = p.id)
            ORDER BY p.place);
    END IF;
    v_turns := once.key_turns(p_queue.id, p_queue.key_running_max, v_ids);
    v_ids := ARRAY(SELECT p.id FROM unnest(p_ids) WITH ORDINALITY p (id, place) WHERE p.id = ANY (v_turns)
                   ORDER BY p.place LIMIT p_limit);
    IF v_gone <> '{}' THEN
        DELETE FROM once.job_unique u USING unnest(v_ids) p (id) JOIN once.job j ON j.id = p.id
        WHERE u.queue = j.queue AND u.tenant = j.tenant AND u.unique_key = j.unique_key AND u.job_id = j.id
          AND j.unique_scope = 'waiting';
    END IF;
    RETURN ARRAY(SELECT j.ctid FROM once.job j WHERE j.id = ANY (v_ids));
END $$;
