-- once.admit for many messages of one source: a row a message, in the order given, with its verdict:
--   new        apply it, in this transaction;
--   duplicate  it was applied before, or is in this batch a second time;
--   conflict   the id was used with another body (once.admit raises P4050): do not apply it. It costs its neighbours
--              nothing, and is the caller's to report.
-- Messages are inserted in the order of their ids, so that two batches with the same ones wait, and never deadlock.
-- A batch is taken for new unless its first or last message is known: a plain INSERT costs a fifth less than one with
-- ON CONFLICT. Where that was wrong, its subtransaction is undone, and every message gets its own verdict.
-- Arrays are unnested in the SELECT list on that way: in FROM each would be written down and read again first.
CREATE OR REPLACE FUNCTION once.admit_batch(
    p_consumer text, p_source text, p_message_ids text[], p_body_hashes bytea[], p_tenant text DEFAULT '')
RETURNS TABLE (ordinal int, message_id text, verdict text)
LANGUAGE plpgsql ROWS 500 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_count int := once.check_parallel(cardinality(p_message_ids), once.shape(p_message_ids),
                                       coalesce(once.shape(p_body_hashes), ''));
    v_stream int := once.stream_id(p_tenant, p_consumer, p_source);
    v_now timestamptz := once.clock();
BEGIN
    -- Characters are looked at in one go: a look at each id is dearer than all of them together.
    IF array_to_string(p_message_ids, '') ~ '[[:cntrl:]]' OR (
        SELECT min(octet_length(m.id)) < 1 OR max(octet_length(m.id)) > 255 OR count(m.id) < v_count
            OR min(octet_length(m.hash)) < 1 OR max(octet_length(m.hash)) > 64 OR count(m.hash) < v_count
        FROM (SELECT unnest(p_message_ids) AS id, unnest(p_body_hashes) AS hash) m) THEN
        PERFORM once.check_message(m.id, m.hash) FROM unnest(p_message_ids, p_body_hashes) m (id, hash);
    END IF;
    IF NOT EXISTS (SELECT 1 FROM once.admitted a
                   WHERE a.stream = v_stream AND a.message_id IN (p_message_ids[1], p_message_ids[v_count])) THEN
        BEGIN
            INSERT INTO once.admitted (at, stream, message_id, body_hash)
            SELECT v_now, v_stream, m.id, m.hash
            FROM (SELECT unnest(p_message_ids) AS id, unnest(p_body_hashes) AS hash) m ORDER BY m.id COLLATE "C";
            RETURN QUERY SELECT generate_series(1, v_count), unnest(p_message_ids), 'new';
            RETURN;
        EXCEPTION WHEN unique_violation THEN
            NULL; -- a message is known, or is twice in the batch
        END;
    END IF;
    RETURN QUERY SELECT * FROM once.admit_each(v_stream, p_message_ids, p_body_hashes);
END $$;
