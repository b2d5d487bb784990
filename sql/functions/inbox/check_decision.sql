-- An operator's decision has an actor and a reason.
CREATE OR REPLACE FUNCTION once.check_decision(p_actor text, p_reason text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF coalesce(btrim(p_actor), '') = '' OR coalesce(btrim(p_reason), '') = ''
       OR octet_length(p_actor) > 255 OR octet_length(p_reason) > 2000 THEN
        RAISE EXCEPTION 'a decision needs an actor and a reason' USING ERRCODE = 'P4013',
            HINT = 'Who decides (at most 255 bytes), and why (at most 2000): both go into the audit trail.';
    END IF;
END $$;
