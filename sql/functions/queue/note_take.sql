-- Notes among which ids a take holds jobs that stay in their line, until its lease is over. Its claim id says which they are.
CREATE OR REPLACE FUNCTION once.note_take(p_queue int, p_until timestamptz, p_claim_id uuid, p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_first bigint;
    v_last bigint;
    v_ids int8multirange;
BEGIN
    SELECT min(i.id), max(i.id) INTO v_first, v_last FROM unnest(p_ids) i (id);
    IF v_last - v_first = cardinality(p_ids) - 1 THEN
        v_ids := int8multirange(int8range(v_first, v_last, '[]')); -- mostly: quicker than adding them up
    ELSE
        v_ids := (SELECT range_agg(int8range(i.id, i.id, '[]')) FROM unnest(p_ids) i (id));
    END IF;
    INSERT INTO once.job_take (queue, until, claim_id, ids) VALUES (p_queue, p_until, p_claim_id, v_ids);
END $$;
