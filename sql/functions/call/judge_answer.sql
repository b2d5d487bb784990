-- What a status means for the call that it answers. A refusal of a call whose earlier send may have arrived says nothing
-- about that one, unless nobody else could be asked.
CREATE OR REPLACE FUNCTION once.judge_answer(p_policy once.provider, p_doubted boolean, p_code int) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN CASE
        WHEN p_code = 202 AND p_policy.accepted = 'pending' THEN 'pending'
        WHEN p_code BETWEEN 200 AND 299 THEN 'confirmed'
        WHEN p_code IN (425, 429) THEN 'not_done'
        WHEN p_code IN (408, 409) THEN 'unclear'
        WHEN p_code BETWEEN 400 AND 499 AND p_policy.reconcile <> 'none' AND (p_doubted OR p_policy.verify_failed) THEN 'unclear'
        WHEN p_code IN (401, 403, 404, 405, 407, 421) AND p_doubted THEN 'unclear'
        WHEN p_code BETWEEN 400 AND 499 THEN 'failed'
        WHEN p_code >= 500 AND p_policy.server_error = 'not_done' THEN 'not_done'
        ELSE 'unclear' END;
END $$;
