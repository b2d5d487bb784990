-- Who does it and why: asked for whatever an operator decides.
CREATE OR REPLACE FUNCTION once.check_operator(p_actor text, p_reason text) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF coalesce(btrim(p_actor), '') = '' OR coalesce(btrim(p_reason), '') = '' THEN
        RAISE EXCEPTION 'this needs an actor and a reason' USING ERRCODE = 'P4013', HINT = 'They are kept in once.audit_trail.';
    END IF;
END $$;
