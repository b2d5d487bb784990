-- Says what is wrong with a message's name. Messages never carry what was sent.
CREATE OR REPLACE FUNCTION once.check_message(p_message_id text, p_body_hash bytea) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_message_id IS NULL OR octet_length(p_message_id) NOT BETWEEN 1 AND 255 OR p_message_id ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'message id is missing, longer than 255 bytes, or has control characters'
            USING ERRCODE = 'P4001', HINT = 'The id is the producer''s: the same for every delivery of the message.';
    END IF;
    IF p_body_hash IS NULL OR octet_length(p_body_hash) NOT BETWEEN 1 AND 64 THEN
        RAISE EXCEPTION 'body hash is missing or longer than 64 bytes'
            USING ERRCODE = 'P4003', HINT = 'sha256(body) makes one.';
    END IF;
END $$;
