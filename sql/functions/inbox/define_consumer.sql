-- Declares a consumer's rules. What is not named has its default; calling it again replaces the rules, and
-- calling it with the same ones writes nothing, so services may call it at every start.
CREATE OR REPLACE FUNCTION once.define_consumer(p_consumer text, p_policy jsonb DEFAULT '{}', p_tenant text DEFAULT '')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_new once.consumer;
    v_old once.consumer;
    v_name text;
    v_value jsonb;
BEGIN
    PERFORM once.check_stream(p_tenant, p_consumer, 'source');
    IF p_policy IS NULL OR jsonb_typeof(p_policy) <> 'object' THEN
        RAISE EXCEPTION 'a policy is a JSON object' USING ERRCODE = 'P4020';
    END IF;
    SELECT * INTO STRICT v_new FROM once.consumer WHERE consumer = '' AND tenant = '';
    v_new.consumer := p_consumer;
    v_new.tenant := p_tenant;
    v_new.updated_at := once.clock();
    FOR v_name, v_value IN SELECT * FROM jsonb_each(p_policy) LOOP
        CASE v_name
        WHEN 'retention' THEN
            v_new.retention := CASE v_value #>> '{}' WHEN 'permanent' THEN NULL
                ELSE once.policy_interval(v_name, v_value, '1 second', '100 years') END;
        WHEN 'attempts_max' THEN v_new.attempts_max := once.policy_number(v_name, v_value, 1, 1000000);
        WHEN 'backoff' THEN v_new.backoff := once.policy_interval(v_name, v_value, '0', '1 day');
        WHEN 'backoff_max' THEN v_new.backoff_max := once.policy_interval(v_name, v_value, '0', '7 days');
        WHEN 'gap_max' THEN v_new.gap_max := once.policy_interval(v_name, v_value, '1 millisecond', '100 years');
        WHEN 'on_poison' THEN v_new.on_poison := once.policy_text(v_name, v_value, ARRAY['block', 'skip']);
        WHEN 'lease' THEN v_new.lease := once.policy_interval(v_name, v_value, '10 milliseconds', '1 day');
        ELSE
            RAISE EXCEPTION 'unknown policy key %', quote_literal(left(v_name, 40))
                USING ERRCODE = 'P4020', HINT = 'docs/reference/sql.md lists the policy keys of consumers.';
        END CASE;
    END LOOP;
    SELECT * INTO v_old FROM once.consumer WHERE consumer = p_consumer AND tenant = p_tenant;
    IF FOUND AND (to_jsonb(v_old) - 'updated_at') = (to_jsonb(v_new) - 'updated_at') THEN
        RETURN;
    END IF;
    INSERT INTO once.consumer SELECT v_new.*
    ON CONFLICT (consumer, tenant) DO UPDATE SET
        retention = excluded.retention, attempts_max = excluded.attempts_max, backoff = excluded.backoff,
        backoff_max = excluded.backoff_max, gap_max = excluded.gap_max, on_poison = excluded.on_poison,
        lease = excluded.lease, updated_at = excluded.updated_at;
    IF v_new.retention IS DISTINCT FROM v_old.retention THEN
        UPDATE once.admitted_range SET due = '-infinity'; -- reckoned with the old one
    END IF;
    INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
        VALUES (session_user, 'define_consumer', p_tenant, p_consumer, '', p_policy::text);
END $$;
