-- Whether a provider's rules fit together.
CREATE OR REPLACE FUNCTION once.check_provider(p_new once.provider) RETURNS void LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_wrong text := CASE
        WHEN p_new.key_header !~ '^[A-Za-z0-9-]{1,64}$' THEN 'key_header is not the name of a header'
        WHEN jsonb_typeof(p_new.header_env) <> 'object' OR EXISTS (
            SELECT FROM jsonb_each(CASE jsonb_typeof(p_new.header_env) WHEN 'object' THEN p_new.header_env END) h
            WHERE h.key !~ '^[A-Za-z0-9-]{1,64}$' OR jsonb_typeof(h.value) <> 'string'
               OR h.value #>> '{}' !~ '^PGONCE_CALL_[A-Z0-9_]{1,64}$')
            THEN 'header_env does not map header names to variables whose names begin with PGONCE_CALL_'
        WHEN p_new.reference !~ '^[A-Za-z0-9_.-]{1,255}$' THEN 'reference is not a path as charge.id'
        WHEN p_new.absent = 'resend' AND NOT p_new.resend THEN 'absent can be resend only where resend is true'
        WHEN p_new.absent <> 'escalate' AND p_new.absent_after IS NULL
            THEN 'absent_after must say from when on an absence is believed'
        -- Until then its sender may still be sending: an absence proves nothing.
        WHEN p_new.absent_after < p_new.timeout + p_new.grace THEN 'absent_after must be at least timeout and grace together'
        WHEN p_new.absent <> 'escalate' AND p_new.reconcile = 'none' THEN 'absent needs a reconcile that could find it absent'
        WHEN p_new.verify_failed AND p_new.reconcile = 'none' THEN 'verify_failed needs a reconcile that could verify'
        WHEN p_new.reconcile = 'http' AND p_new.base_url IS NULL THEN 'reconcile by http needs a base_url'
        END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION 'the policy does not fit together: %', v_wrong USING ERRCODE = 'P4020',
            HINT = 'docs/guides/calls.md says what each key is for.';
    END IF;
    IF p_new.on_settled IS NOT NULL THEN
        PERFORM once.check_call_function('on_settled', p_new.on_settled, ARRAY['uuid', 'text', 'text']::regtype[], NULL);
    END IF;
    IF p_new.reconcile = 'sql' THEN
        PERFORM once.check_call_function('reconcile', p_new.reconcile_rule ->> 'function', ARRAY['jsonb']::regtype[],
            ARRAY['text', 'jsonb']::regtype[]);
    END IF;
END $$;
