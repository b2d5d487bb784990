-- A batch in which some messages are known: inserts the others and says of each what it is. Of one id twice in the batch,
-- the first is inserted. With a snapshot too old to see a rival's row, ON CONFLICT raises 40001.
CREATE OR REPLACE FUNCTION once.admit_each(p_stream int, p_message_ids text[], p_body_hashes bytea[])
RETURNS TABLE (ordinal int, message_id text, verdict text)
LANGUAGE plpgsql VOLATILE ROWS 500 AS $$
#variable_conflict use_column
DECLARE
    v_new text[] := '{}';
    v_more text[];
BEGIN
    LOOP
        WITH inserted AS (
            INSERT INTO once.admitted AS a (at, stream, message_id, body_hash)
            SELECT once.clock(), p_stream, m.id, m.hash
            FROM unnest(p_message_ids, p_body_hashes) WITH ORDINALITY m (id, hash, place)
            ORDER BY m.id COLLATE "C", m.place
            ON CONFLICT DO NOTHING RETURNING a.message_id
        )
        SELECT array_agg(i.message_id) INTO v_more FROM inserted i;
        v_new := v_new || v_more;
        -- A statement of its own: its snapshot is younger than what rivals committed while we waited for them.
        EXIT WHEN NOT EXISTS (
            SELECT 1 FROM unnest(p_message_ids) m (id) LEFT JOIN LATERAL (
                SELECT a.at FROM once.admitted a WHERE a.stream = p_stream AND a.message_id = m.id OFFSET 0) a ON true
            WHERE a.at IS NULL); -- else purge came between
    END LOOP;
    RETURN QUERY
    SELECT m.place::int, m.id, CASE
        WHEN n.id IS NOT NULL AND row_number() OVER (PARTITION BY m.id COLLATE "C" ORDER BY m.place) = 1 THEN 'new'
        WHEN a.body_hash = m.hash THEN 'duplicate' ELSE 'conflict' END
    FROM unnest(p_message_ids, p_body_hashes) WITH ORDINALITY m (id, hash, place)
    -- OFFSET 0: one look into the index a message, whatever the planner thinks that the table holds.
    CROSS JOIN LATERAL (SELECT a.body_hash FROM once.admitted a
                        WHERE a.stream = p_stream AND a.message_id = m.id OFFSET 0) a
    LEFT JOIN unnest(v_new) n (id) ON n.id = m.id COLLATE "C"
    ORDER BY m.place;
END $$;
