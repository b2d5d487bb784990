-- Whether a message's id and its body's hash are within their limits. Inlined; once.check_message says which is not.
CREATE OR REPLACE FUNCTION once.message_fits(p_message_id text, p_body_hash bytea) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT octet_length(p_message_id) BETWEEN 1 AND 255 AND p_message_id !~ '[[:cntrl:]]'
       AND octet_length(p_body_hash) BETWEEN 1 AND 64 $$;
