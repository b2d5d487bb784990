-- A notice's word about the call that it belongs to. The caller holds both rows.
CREATE OR REPLACE FUNCTION once.apply_notice(p_notice once.call_notice, p_call once.call) RETURNS once.call_state LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_policy once.provider;
BEGIN
    SELECT * INTO STRICT v_policy FROM once.provider p WHERE p.provider = p_call.provider;
    UPDATE once.call_notice n SET call_id = p_call.id WHERE n.provider = p_notice.provider AND n.notice_id = p_notice.notice_id;
    RETURN once.call_conclude(p_call, v_policy, p_notice.verdict, 'notice', p_notice.notice_id, p_body => p_notice.body,
        p_reference => p_notice.reference);
END $$;
