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
    v_answers once.claim_answer[];
    v_absent int[];
    v_rest int[];
    v_left int[];
    v_at int;
BEGIN
    IF once.check_batch(cardinality(p_keys), once.shape(p_keys), once.shape(p_tenants), once.shape(p_scopes),
                        once.shape(p_fingerprints), once.shape(p_claim_ids)) = 1 THEN
        RETURN NEXT once.claim_alone(p_tenants[1], p_scopes[1], p_keys[1], p_fingerprints[1], p_claim_ids[1],
                                     p_claimed_by);
        RETURN;
    END IF;
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
    FOREACH v_at IN ARRAY v_rest LOOP
        RETURN NEXT once.claim_apart(v_at, p_tenants[v_at], p_scopes[v_at], p_keys[v_at], p_fingerprints[v_at],
                                     p_claim_ids[v_at], p_claimed_by);
    END LOOP;
END $$;
