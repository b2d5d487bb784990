-- What a worker may say of a call.
CREATE OR REPLACE FUNCTION once.check_heard(p_outcome text, p_code int, p_verdict text, p_delay interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_outcome IS NULL OR p_outcome NOT IN ('answered', 'lost', 'unsent')
       OR (p_outcome = 'answered' AND p_verdict IS NULL AND (p_code BETWEEN 100 AND 599) IS NOT TRUE)
       OR p_verdict NOT IN ('confirmed', 'failed', 'pending', 'unclear', 'absent', 'not_done')
       OR p_delay NOT BETWEEN interval '0' AND interval '100 days' THEN
        RAISE EXCEPTION 'no worker can have heard this' USING ERRCODE = 'P4020', HINT =
            'An outcome is answered, lost or unsent; an answer has a status or a verdict; a delay is 0 to 100 days.';
    END IF;
END $$;
