-- What a group of entries may be; says what is wrong with it. Messages never carry what was sent.
CREATE OR REPLACE FUNCTION once_ledger.check_posting(
    p_source text, p_operation text, p_accounts text[], p_amounts bigint[], p_currencies text[], p_description text, p_tenant text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_wrong text := CASE
        WHEN (octet_length(p_source) BETWEEN 1 AND 128 AND p_source !~ '[[:cntrl:]]') IS NOT TRUE
            THEN 'its source is missing, longer than 128 bytes, or has control characters'
        WHEN (octet_length(p_operation) BETWEEN 1 AND 255 AND p_operation !~ '[[:cntrl:]]') IS NOT TRUE
            THEN 'its operation is missing, longer than 255 bytes, or has control characters'
        WHEN (octet_length(p_tenant) <= 255 AND p_tenant !~ '[[:cntrl:]]') IS NOT TRUE
            THEN 'its tenant is NULL, longer than 255 bytes, or has control characters'
        WHEN octet_length(p_description) > 1024 THEN 'its description is longer than 1024 bytes'
        WHEN (array_ndims(p_accounts) = 1 AND array_lower(p_accounts, 1) = 1 AND cardinality(p_accounts) BETWEEN 2 AND 1000) IS NOT TRUE
            THEN 'it has not 2 to 1000 entries'
        WHEN (array_ndims(p_amounts) = 1 AND array_lower(p_amounts, 1) = 1 AND cardinality(p_amounts) = cardinality(p_accounts)) IS NOT TRUE
            THEN 'it has not one amount for each account'
        WHEN (array_ndims(p_currencies) = 1 AND array_lower(p_currencies, 1) = 1
              AND cardinality(p_currencies) IN (1, cardinality(p_accounts))) IS NOT TRUE
            THEN 'it has neither one currency nor one for each account'
        WHEN array_position(p_accounts, NULL) > 0 OR array_position(p_amounts, NULL) > 0 OR array_position(p_currencies, NULL) > 0
            THEN 'an account, an amount or a currency is NULL'
        WHEN 0 = ANY (p_amounts) OR '-9223372036854775808' = ANY (p_amounts) THEN 'an amount is zero or out of range'
        END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION 'this cannot be posted: %', v_wrong USING ERRCODE = 'P4090',
            DETAIL = 'Nothing was posted.', HINT = 'See docs/reference/sql.md, once_ledger.post.';
    END IF;
END $$;
