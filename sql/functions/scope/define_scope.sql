-- Declares a scope's rules. What is not named has its default; calling it again replaces the rules,
-- and calling it with the same ones writes nothing, so services may call it at every start.
CREATE OR REPLACE FUNCTION once.define_scope(p_scope text, p_policy jsonb DEFAULT '{}', p_tenant text DEFAULT '')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_new once.scope;
    v_old once.scope;
    v_name text;
    v_value jsonb;
BEGIN
    PERFORM once.check_intent(p_tenant, p_scope, 'key', sha256(''), NULL);
    IF p_policy IS NULL OR jsonb_typeof(p_policy) <> 'object' THEN
        RAISE EXCEPTION 'a policy is a JSON object' USING ERRCODE = 'P4020';
    END IF;
    SELECT * INTO STRICT v_new FROM once.scope WHERE scope = '' AND tenant = '';
    v_new.scope := p_scope;
    v_new.tenant := p_tenant;
    v_new.updated_at := once.clock();
    FOR v_name, v_value IN SELECT * FROM jsonb_each(p_policy) LOOP
        CASE v_name
        WHEN 'mode' THEN v_new.mode := once.policy_text(v_name, v_value, ARRAY['atomic', 'leased']);
        WHEN 'in_progress' THEN v_new.in_progress := once.policy_text(v_name, v_value, ARRAY['wait', 'refuse', 'status']);
        WHEN 'stale' THEN v_new.stale := once.policy_text(v_name, v_value, ARRAY['rerun', 'probe', 'hold']);
        WHEN 'response' THEN
            v_new.response := once.policy_text(v_name, v_value, ARRAY['full', 'reference', 'status', 'error']);
        WHEN 'attempts_max' THEN v_new.attempts_max := once.policy_number(v_name, v_value, 1, 1000000);
        WHEN 'waiters_max' THEN v_new.waiters_max := once.policy_number(v_name, v_value, 0, 1000);
        WHEN 'lease' THEN v_new.lease := once.policy_interval(v_name, v_value, '10 milliseconds', '1 day');
        WHEN 'wait_max' THEN v_new.wait_max := once.policy_interval(v_name, v_value, '0', '5 minutes');
        WHEN 'retention' THEN
            v_new.retention := CASE v_value #>> '{}' WHEN 'permanent' THEN NULL WHEN 'none' THEN interval '0'
                ELSE once.policy_interval(v_name, v_value, '1 millisecond', '100 years') END;
        WHEN 'tombstone' THEN
            v_new.tombstone := CASE v_value #>> '{}' WHEN 'permanent' THEN interval '10000 years' WHEN 'none' THEN NULL
                ELSE once.policy_interval(v_name, v_value, '1 millisecond', '100 years') END;
        WHEN 'probe' THEN
            v_new.probe := once.policy_text(v_name, v_value, NULL);
            PERFORM once.check_probe(v_new.probe);
        WHEN 'key_pattern' THEN
            v_new.key_pattern := once.policy_text(v_name, v_value, NULL);
            BEGIN
                PERFORM '' ~ v_new.key_pattern;
            EXCEPTION WHEN invalid_regular_expression THEN
                RAISE EXCEPTION 'policy key_pattern is not a regular expression' USING ERRCODE = 'P4020';
            END;
        ELSE
            RAISE EXCEPTION 'unknown policy key %', quote_literal(left(v_name, 40))
                USING ERRCODE = 'P4020', HINT = 'docs/reference/sql.md lists the policy keys.';
        END CASE;
    END LOOP;
    IF v_new.stale = 'probe' AND v_new.probe IS NULL THEN
        RAISE EXCEPTION 'policy stale = probe needs a probe function' USING ERRCODE = 'P4020';
    END IF;
    SELECT * INTO v_old FROM once.scope WHERE scope = p_scope AND tenant = p_tenant;
    IF FOUND AND (to_jsonb(v_old) - 'updated_at') = (to_jsonb(v_new) - 'updated_at') THEN
        RETURN;
    END IF;
    INSERT INTO once.scope SELECT v_new.*
    ON CONFLICT (scope, tenant) DO UPDATE SET
        mode = excluded.mode, retention = excluded.retention, tombstone = excluded.tombstone,
        lease = excluded.lease, in_progress = excluded.in_progress, wait_max = excluded.wait_max,
        waiters_max = excluded.waiters_max, stale = excluded.stale, probe = excluded.probe,
        response = excluded.response, attempts_max = excluded.attempts_max,
        key_pattern = excluded.key_pattern, updated_at = excluded.updated_at;
    INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
        VALUES (session_user, 'define_scope', p_tenant, p_scope, '', p_policy::text);
END $$;
