-- The end of a batch's transaction: what became of its rows, beside the rows themselves. Moves the job from p_first to
-- behind p_last, if that is where it stands and it is the caller's; else it raises, and takes the batch's rows back.
-- Rows are the file's, from 1. What no array names was applied.
CREATE OR REPLACE FUNCTION once.import_record(
    p_job bigint, p_claim_id uuid, p_first bigint, p_last bigint, p_next_offset bigint, p_next_line bigint, p_lease interval,
    p_existing bigint[] DEFAULT NULL, p_unchanged bigint[] DEFAULT NULL, p_dropped bigint[] DEFAULT NULL,
    p_failed bigint[] DEFAULT NULL, p_lines bigint[] DEFAULT NULL, p_codes text[] DEFAULT NULL,
    p_messages text[] DEFAULT NULL, p_inputs bytea[] DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_failed int := coalesce(cardinality(p_failed), 0);
    v_skipped int := coalesce(cardinality(p_existing), 0) + coalesce(cardinality(p_unchanged), 0) + coalesce(cardinality(p_dropped), 0);
    v_applied int := p_last - p_first + 1 - v_failed - v_skipped;
BEGIN
    IF (p_first <= p_last AND v_applied >= 0 AND p_lease BETWEEN interval '1 second' AND interval '1 day') IS NOT TRUE
       OR (SELECT min(r) < p_first OR max(r) > p_last OR count(*) <> count(DISTINCT r)
           FROM unnest(p_existing || p_unchanged || p_dropped || p_failed) r) THEN
        RAISE EXCEPTION 'a batch that cannot be: rows outside of it, or named twice' USING ERRCODE = 'P4080',
            HINT = 'Each row from first to last is named at most once; a lease is from 1 second to 1 day.';
    END IF;
    UPDATE once.import_job j SET next_row = p_last + 1, next_offset = p_next_offset, next_line = p_next_line,
        applied = j.applied + v_applied, skipped = j.skipped + v_skipped, failed = j.failed + v_failed,
        updated_at = once.clock(), leased_until = once.clock() + p_lease
    WHERE j.id = p_job AND j.claim_id = p_claim_id AND j.state = 'running' AND j.next_row = p_first;
    IF NOT FOUND THEN
        PERFORM once.import_lost();
    END IF;
    INSERT INTO once.import_batch (job, first_row, last_row, applied, failed, at, existing, unchanged, dropped)
    VALUES (p_job, p_first, p_last, v_applied, v_failed, once.clock(), once.import_ranges(p_existing),
            once.import_ranges(p_unchanged), once.import_ranges(p_dropped));
    IF v_failed > 0 THEN
        INSERT INTO once.import_row (job, row, line, code, message, input)
        SELECT p_job, f.* FROM unnest(p_failed, p_lines, p_codes, p_messages, p_inputs) f;
    END IF;
END $$;
