-- Raised to a worker that does not hold the message any more.
CREATE OR REPLACE FUNCTION once.inbox_lost() RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION 'this call does not hold the message' USING ERRCODE = 'P4051',
        DETAIL = 'The lease was lost, the claim id is not the current one, or the message has its end already.',
        HINT = 'Roll back: whatever this transaction did must not stay. Another worker has the message, or had it.';
END $$;
