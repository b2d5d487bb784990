-- Whether a group is two sound entries of two accounts in one currency, in the order of their names. Inlined into post;
-- once_ledger.check_posting knows all the rules.
CREATE OR REPLACE FUNCTION once_ledger.is_plain(
    p_source text, p_operation text, p_accounts text[], p_amounts bigint[], p_currencies text[], p_tenant text, p_description text)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT octet_length(p_source) BETWEEN 1 AND 128 AND octet_length(p_operation) BETWEEN 1 AND 255 AND octet_length(p_tenant) <= 255
       AND p_source || p_operation || p_tenant !~ '[[:cntrl:]]' AND (p_description IS NULL OR octet_length(p_description) <= 1024)
       AND array_dims(p_accounts) = '[1:2]' AND array_dims(p_amounts) = '[1:2]' AND array_dims(p_currencies) = '[1:1]'
       AND p_accounts[1] < p_accounts[2] COLLATE "C" AND p_currencies[1] IS NOT NULL
       AND p_amounts[1] > -9223372036854775807 AND p_amounts[2] > -9223372036854775807
       AND p_amounts[1] = -p_amounts[2] AND p_amounts[1] <> 0 $$;
