-- Applies the rows that were staged for a batch, with the caller's rights, and tells which were not applied, and why. A
-- bad row does not cost its batch: what fails is undone and halved until the row stands alone, so that a bad row costs a
-- few dozen statements, and a batch without one costs a single subtransaction.
-- The statements are the caller's, for the caller's table; once_n is a row's number in the batch, $1 and $2 are the first and the last:
--   p_apply     writes rows; returns: eligible, written, matched (how many rows have a key that was written), absent int[]
--               (rows whose key was not), keyless int[] (rows without a key, which are not written)
--   p_distinct  the same where rows of one key come twice, and the last one counts (NULL: p_apply can take that)
--   p_repeated  int[] of the rows whose key was in an earlier row; p_known  of $1, a list, those whose key is in the table
-- p_fail: a key that is there is a failure, not a skip. Stops when more than p_failures_max rows have failed: the caller
-- rolls back then.
CREATE OR REPLACE FUNCTION once.import_apply(
    p_rows int, p_apply text, p_distinct text, p_repeated text, p_known text, p_existing text, p_failures_max bigint,
    p_search_path text)
RETURNS TABLE (n int, outcome text, reason text, message text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_first int[] := ARRAY[0];
    v_last int[] := ARRAY[p_rows - 1];
    v_from int;
    v_to int;
    v_top int := 1;
    v_middle int;
    v_failed bigint := 0;
    v_statement text;
    v_code text;
    v_said text;
    v_done record;
    v_repeated int[];
    v_known int[];
BEGIN
    -- The caller's own: names in a transformation and in triggers mean what they mean to the caller.
    PERFORM set_config('search_path', p_search_path, true);
    WHILE v_top > 0 AND v_failed <= p_failures_max LOOP
        v_from := v_first[v_top];
        v_to := v_last[v_top];
        v_top := v_top - 1;
        v_statement := p_apply;
        v_code := NULL;
        <<attempt>> LOOP
            BEGIN
                EXECUTE v_statement INTO STRICT v_done USING v_from, v_to;
                EXIT attempt;
            EXCEPTION WHEN OTHERS THEN
                GET STACKED DIAGNOSTICS v_code = RETURNED_SQLSTATE, v_said = MESSAGE_TEXT;
                -- Not a row's fault: the server's, the connection's, a rival's, or the statement's own.
                IF left(v_code, 2) IN ('08', '0A', '25', '28', '3D', '3F', '40', '53', '55', '57', '58', '72', 'F0', 'XX')
                   OR (left(v_code, 2) = '42' AND v_code <> '42501') THEN
                    RAISE;
                END IF;
            END;
            EXIT attempt WHEN v_code <> '21000' OR p_distinct IS NULL OR v_statement = p_distinct;
            v_statement := p_distinct;
            v_code := NULL;
        END LOOP;
        IF v_code IS NOT NULL THEN
            IF v_from = v_to THEN
                v_failed := v_failed + 1;
                RETURN QUERY SELECT v_from, 'failed'::text, v_code, v_said;
            ELSE
                IF v_from = 0 AND v_to = p_rows - 1 THEN
                    CREATE INDEX ON pg_temp.once_stage (once_n);
                END IF;
                -- The left half is done first: the file's order decides between rows of one key.
                v_middle := (v_from + v_to) / 2;
                v_first[v_top + 1] := v_middle + 1;
                v_last[v_top + 1] := v_to;
                v_first[v_top + 2] := v_from;
                v_last[v_top + 2] := v_middle;
                v_top := v_top + 2;
            END IF;
            CONTINUE;
        END IF;
        RETURN QUERY SELECT k, 'failed'::text, '23502'::text, 'the natural key is null'::text FROM unnest(v_done.keyless) k;
        v_failed := v_failed + coalesce(cardinality(v_done.keyless), 0);
        CONTINUE WHEN v_done.written = v_done.eligible;
        v_repeated := NULL;
        IF p_distinct IS NULL AND v_done.matched > v_done.written THEN
            EXECUTE p_repeated INTO v_repeated USING v_from, v_to;
            v_repeated := ARRAY(SELECT unnest(v_repeated) EXCEPT SELECT unnest(v_done.absent));
        END IF;
        EXECUTE p_known INTO v_known USING v_done.absent;
        IF p_existing = 'failed' THEN
            RETURN QUERY SELECT k, 'failed'::text, '23505'::text, 'the natural key is there already'::text
                FROM unnest(v_repeated || v_known) k;
            v_failed := v_failed + coalesce(cardinality(v_repeated || v_known), 0);
        ELSE
            RETURN QUERY SELECT k, 'skipped'::text, p_existing, NULL::text FROM unnest(v_repeated || v_known) k;
        END IF;
        RETURN QUERY SELECT d.a, 'skipped'::text, 'dropped'::text, NULL::text
            FROM (SELECT unnest(v_done.absent) AS a EXCEPT SELECT unnest(v_known)) d;
    END LOOP;
END $$;
