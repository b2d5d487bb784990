-- once.succeed for many leased claims at once, each under its fence and with its own verdict:
--   recorded   it is in the row now;
--   before     the row is terminal under this very claim: the work recorded it in its own transaction, or this
--              batch was sent before. What is stored is in the answer, and counts;
--   lost       the claim is not the current one;
--   busy       another transaction holds the row, perhaps the work's own with its outcome: ask again;
--   too_large  a part of it is over its limit (once.answer_fits): not recorded.
-- It never waits: one row that is held must not keep its neighbours' outcomes from being recorded.
CREATE OR REPLACE FUNCTION once.succeed_batch(
    p_tenants text[], p_scopes text[], p_keys text[], p_claim_ids uuid[], p_response_codes int[],
    p_response_headers jsonb[], p_response_bodies bytea[], p_result_types text[], p_result_ids text[])
RETURNS SETOF once.completion_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF once.check_batch(cardinality(p_keys), once.shape(p_keys), once.shape(p_tenants), once.shape(p_scopes),
        once.shape(p_claim_ids), once.shape(p_response_codes), once.shape(p_response_headers),
        once.shape(p_response_bodies), once.shape(p_result_types), once.shape(p_result_ids)) = 1 THEN
        RETURN NEXT once.succeed_alone(p_tenants[1], p_scopes[1], p_keys[1], p_claim_ids[1], p_response_codes[1],
            p_response_headers[1], p_response_bodies[1], p_result_types[1], p_result_ids[1]);
        RETURN;
    END IF;
    RETURN QUERY SELECT * FROM once.complete_batch(p_tenants, p_scopes, p_keys, p_claim_ids, p_response_codes,
        p_response_headers, p_response_bodies, p_result_types, p_result_ids);
END $$;
