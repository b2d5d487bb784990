-- A message id that is in the log already: the same message said again, or another one, which must not be lost in silence.
CREATE OR REPLACE FUNCTION once.check_repeated(p_message_id uuid, p_tenant text, p_topic text, p_type text, p_payload jsonb)
RETURNS void LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM once.outbox o WHERE o.message_id = p_message_id AND o.made_up IS NULL AND o.tenant = p_tenant
                   AND o.topic = p_topic AND o.type = p_type AND o.payload = p_payload) THEN
        RAISE EXCEPTION 'this message id is in the outbox with another content' USING ERRCODE = 'P4041',
            DETAIL = 'An intent emits one message of a type; this one was not added.',
            HINT = 'Give each further message of the type its own p_ordinal.';
    END IF;
END $$;
