-- Raised to a worker that does not hold the job any more. Ids are no secret; keys and payloads are not told.
CREATE OR REPLACE FUNCTION once.job_lost(p_ids bigint[]) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION 'this call does not hold the job' USING ERRCODE = 'P4060',
        DETAIL = format('The lease was lost, the claim id is not the current one, or the job has ended already. Jobs: %s.',
                        array_to_string(p_ids[1:20], ', ')),
        HINT = 'Roll back: whatever this transaction did must not stay. Another worker has the job, or had it.';
END $$;
