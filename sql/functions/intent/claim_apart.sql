-- One claim of a batch, or one alone, that needs more than a look or an insert: in a subtransaction, so that what
-- once.claim would raise comes out in its row's error, and costs its neighbours nothing.
CREATE OR REPLACE FUNCTION once.claim_apart(
    p_ordinal int, p_tenant text, p_scope text, p_key text, p_fingerprint bytea, p_claim_id uuid, p_claimed_by text)
RETURNS once.claim_answer LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_result once.claim_result;
    v_now timestamptz := once.clock();
BEGIN
    v_result := once.claim_as(p_tenant, p_scope, p_key, p_fingerprint, p_claim_id, p_claimed_by);
    IF v_result.kind = 'processing_active' AND v_result.locked_until IS NULL THEN
        v_result.retry_after_ms := 100; -- somebody is at it this very moment: worth coming again soon
    END IF;
    RETURN ROW(p_ordinal, NULL, NULL, (v_result).*, once.expires_in_ms(v_result.expires_at, v_now))::once.claim_answer;
EXCEPTION WHEN OTHERS THEN
    -- What the server cannot do now, it cannot do for the neighbours either.
    IF SQLSTATE ~ '^(25|40|53|55|57|58|XX)' THEN
        RAISE;
    END IF;
    v_result := NULL;
    RETURN ROW(p_ordinal, SQLSTATE, SQLERRM, (v_result).*, NULL)::once.claim_answer;
END $$;
