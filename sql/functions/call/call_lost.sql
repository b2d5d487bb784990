-- Raised to a worker that does not hold the call any more.
CREATE OR REPLACE FUNCTION once.call_lost() RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION 'this worker does not hold the call' USING ERRCODE = 'P4061',
        DETAIL = 'The lease was lost and another worker has taken the call, or there is no such call.',
        HINT = 'Do nothing more about it: whoever has it asks the provider what became of it.';
END $$;
