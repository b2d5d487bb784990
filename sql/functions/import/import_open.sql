-- Names an import: by what the file contains and by what is asked of it. Returns what is to be done:
--   new, resumed   it is the caller's now: go on at next_row, under claim_id
--   done           it was imported before; the counts say how
--   busy           somebody else imports it, and their lease is running (or their batch is being written); claim_id is
--                  theirs. p_take_from with that id takes it from them: at once, where they are known to be dead.
-- The same content with other options is another job: rows that both bring meet at the target's natural key.
-- p_again: an import that is done is done once more, as a further run.
CREATE OR REPLACE FUNCTION once.import_open(
    p_content bytea, p_size bigint, p_options jsonb, p_target text, p_name text, p_owner text, p_actor text,
    p_lease interval DEFAULT '30 seconds', p_take_from uuid DEFAULT NULL, p_again boolean DEFAULT false,
    p_tenant text DEFAULT '')
RETURNS TABLE (verdict text, job bigint, claim_id uuid, run int, next_row bigint, next_offset bigint, next_line bigint,
               applied bigint, skipped bigint, failed bigint, owner text, lease_ms bigint, ended_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_job once.import_job;
    v_verdict text := 'resumed';
    v_hash bytea := sha256(convert_to(p_options::text, 'UTF8'));
    v_now timestamptz;
BEGIN
    PERFORM once.check_import(p_content, p_options, p_target, p_name, p_owner, p_actor, p_lease, p_tenant);
    LOOP
        SELECT * INTO v_job FROM once.import_job j
        WHERE j.tenant = p_tenant AND j.content = p_content AND j.options_hash = v_hash AND j.state <> 'abandoned'
        ORDER BY j.run DESC LIMIT 1;
        IF v_job.id IS NULL OR (p_again AND v_job.state = 'done') THEN
            v_now := once.clock();
            INSERT INTO once.import_job (tenant, content, size, options, options_hash, run, target, name, owner, actor, claim_id,
                started_at, updated_at, leased_until)
            SELECT p_tenant, p_content, p_size, p_options, v_hash, coalesce(max(j.run), 0) + 1, p_target, p_name, p_owner, p_actor,
                gen_random_uuid(), v_now, v_now, v_now + p_lease
            FROM once.import_job j WHERE j.tenant = p_tenant AND j.content = p_content AND j.options_hash = v_hash
            ON CONFLICT (tenant, content, options_hash, run) DO NOTHING RETURNING * INTO v_job;
            CONTINUE WHEN NOT FOUND; -- somebody was first: theirs is there to be seen now
            v_verdict := 'new';
            EXIT;
        END IF;
        IF v_job.state = 'done' THEN
            v_verdict := 'done';
            EXIT;
        END IF;
        -- A batch that is being written holds this row: then its importer lives, whatever the lease says.
        UPDATE once.import_job j SET state = 'running', claim_id = gen_random_uuid(), owner = p_owner, actor = p_actor,
            leased_until = once.clock() + p_lease, updated_at = once.clock(), last_error = NULL
        WHERE j.id = (SELECT f.id FROM once.import_job f WHERE f.id = v_job.id AND f.claim_id = v_job.claim_id
                      AND f.state IN ('running', 'stopped') FOR UPDATE SKIP LOCKED)
          AND (j.state = 'stopped' OR j.leased_until <= once.clock() OR j.claim_id = p_take_from)
        RETURNING * INTO v_job;
        EXIT WHEN FOUND;
        SELECT * INTO v_job FROM once.import_job j
        WHERE j.tenant = p_tenant AND j.content = p_content AND j.options_hash = v_hash AND j.state = 'running'
        ORDER BY j.run DESC LIMIT 1;
        v_verdict := 'busy';
        EXIT WHEN FOUND;
        v_verdict := 'resumed'; -- it ended between the two looks
    END LOOP;
    RETURN QUERY SELECT v_verdict, v_job.id, v_job.claim_id, v_job.run, v_job.next_row, v_job.next_offset, v_job.next_line,
        v_job.applied, v_job.skipped, v_job.failed, v_job.owner,
        greatest(0, ceil(date_part('epoch', v_job.leased_until - once.clock()) * 1000))::bigint, v_job.ended_at;
END $$;
