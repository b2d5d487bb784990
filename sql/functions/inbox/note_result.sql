-- Records what became of an admitted message, where it is not simply applied, or what it made: applied, ignored or
-- failed_final, with a reference. Only on a message that was admitted, by this transaction or before.
CREATE OR REPLACE FUNCTION once.note_result(
    p_consumer text, p_source text, p_message_id text, p_result text, p_result_type text DEFAULT NULL,
    p_result_id text DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM once.check_result(p_result, p_result_type, p_result_id);
    PERFORM once.check_message(p_message_id, '\x00');
    UPDATE once.admitted a SET result = p_result::once.message_result, result_type = p_result_type, result_id = p_result_id
    FROM once.inbox_stream s
    WHERE s.tenant = p_tenant AND s.consumer = p_consumer AND s.source = p_source
      AND a.stream = s.id AND a.message_id = p_message_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no such message was admitted' USING ERRCODE = 'P4051',
            HINT = 'once.admit comes first, in this transaction or before.';
    END IF;
END $$;
