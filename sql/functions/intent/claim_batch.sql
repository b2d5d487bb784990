-- once.claim for many intents at once: always leased, never waiting, each with its own answer. What once.claim
-- would raise for one comes out in its row's error, and costs its neighbours nothing.
-- The caller chooses the claim ids (new random UUIDs), so that a batch whose answer was lost can be sent again:
-- what was claimed by the first sending is answered as claimed. Of one key twice in a batch the first wins.
-- Call it in a transaction of its own: its locks last as long as that.
CREATE OR REPLACE FUNCTION once.claim_batch(
    p_tenants text[], p_scopes text[], p_keys text[], p_fingerprints bytea[], p_claim_ids uuid[],
    p_claimed_by text DEFAULT NULL)
RETURNS SETOF once.claim_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_answer once.claim_answer;
    v_answers once.claim_answer[];
    v_absent int[];
    v_rest int[] := ARRAY[1];
    v_left int[];
    v_at int;
    v_result once.claim_result;
    v_now timestamptz := once.clock();
BEGIN
    IF once.check_batch(cardinality(p_keys), once.shape(p_keys), once.shape(p_tenants), once.shape(p_scopes),
                        once.shape(p_fingerprints), once.shape(p_claim_ids)) = 1 THEN
        v_answer := once.claim_alone(p_tenants[1], p_scopes[1], p_keys[1], p_fingerprints[1], p_claim_ids[1],
                                     p_claimed_by);
        IF v_answer.ordinal IS NOT NULL THEN
            RETURN NEXT v_answer;
            RETURN;
        END IF;
    ELSE
        SELECT o_answers, o_absent, o_rest INTO v_answers, v_absent, v_rest
            FROM once.look_batch(p_tenants, p_scopes, p_keys, p_fingerprints, p_claim_ids);
        RETURN QUERY SELECT * FROM unnest(v_answers);
        IF v_absent IS NOT NULL THEN
            SELECT o_answers, o_rest INTO v_answers, v_left
                FROM once.own_batch(p_tenants, p_scopes, p_keys, p_fingerprints, p_claim_ids, v_absent, p_claimed_by);
            RETURN QUERY SELECT * FROM unnest(v_answers);
            v_rest := v_rest || v_left;
        END IF;
        IF v_rest IS NULL THEN
            RETURN;
        END IF;
    END IF;
    FOREACH v_at IN ARRAY v_rest LOOP
        BEGIN
            v_result := once.claim_as(p_tenants[v_at], p_scopes[v_at], p_keys[v_at], p_fingerprints[v_at],
                                      p_claim_ids[v_at], p_claimed_by);
            IF v_result.kind = 'processing_active' AND v_result.locked_until IS NULL THEN
                v_result.retry_after_ms := 100; -- somebody is at it this very moment: worth coming again soon
            END IF;
            RETURN QUERY SELECT v_at, NULL::text, NULL::text, (v_result).*,
                                once.expires_in_ms(v_result.expires_at, v_now);
        EXCEPTION WHEN OTHERS THEN
            -- What the server cannot do now, it cannot do for the neighbours either.
            IF SQLSTATE ~ '^(25|40|53|55|57|58|XX)' THEN
                RAISE;
            END IF;
            v_result := NULL;
            RETURN QUERY SELECT v_at, SQLSTATE, SQLERRM, (v_result).*, NULL::bigint;
        END;
    END LOOP;
END $$;
