-- The row of a call that this worker took last, locked. Also one that was settled meanwhile, by a notice or a person:
-- what the worker heard is evidence all the same.
CREATE OR REPLACE FUNCTION once.hold_call(p_id uuid, p_claim_id uuid) RETURNS once.call LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_call once.call;
BEGIN
    SELECT * INTO v_call FROM once.call c WHERE c.id = p_id AND c.claim_id = p_claim_id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM once.call_lost();
    END IF;
    RETURN v_call;
END $$;
