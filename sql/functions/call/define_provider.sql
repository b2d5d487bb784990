-- Declares a provider: where it is, what its answers mean, how to learn what became of a call. What is not named has its
-- default; calling it again replaces the rules, and with the same ones it writes nothing.
CREATE OR REPLACE FUNCTION once.define_provider(p_provider text, p_policy jsonb DEFAULT '{}')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_new once.provider;
    v_old once.provider;
    v_name text;
    v_value jsonb;
BEGIN
    PERFORM once.check_provider_name(p_provider);
    IF p_policy IS NULL OR jsonb_typeof(p_policy) <> 'object' THEN
        RAISE EXCEPTION 'a policy is a JSON object' USING ERRCODE = 'P4020';
    END IF;
    SELECT * INTO STRICT v_new FROM once.provider WHERE provider = '';
    v_new.provider := p_provider;
    v_new.updated_at := once.clock();
    FOR v_name, v_value IN SELECT * FROM jsonb_each(p_policy) LOOP
        CASE v_name
        WHEN 'base_url' THEN v_new.base_url := once.provider_url(v_value);
        WHEN 'key_header' THEN v_new.key_header := once.policy_text(v_name, v_value, NULL);
        WHEN 'header_env' THEN v_new.header_env := v_value;
        WHEN 'timeout' THEN v_new.timeout := once.policy_interval(v_name, v_value, '10 milliseconds', '10 minutes');
        WHEN 'grace' THEN v_new.grace := once.policy_interval(v_name, v_value, '10 milliseconds', '10 minutes');
        WHEN 'resend' THEN v_new.resend := once.policy_boolean(v_name, v_value);
        WHEN 'accepted' THEN v_new.accepted := once.policy_text(v_name, v_value, ARRAY['pending', 'confirmed']);
        WHEN 'server_error' THEN v_new.server_error := once.policy_text(v_name, v_value, ARRAY['unknown', 'not_done']);
        WHEN 'verify_failed' THEN v_new.verify_failed := once.policy_boolean(v_name, v_value);
        WHEN 'reference' THEN v_new.reference := once.policy_text(v_name, v_value, NULL);
        WHEN 'reconcile' THEN v_new.reconcile_rule := once.reconcile_rule(v_value);
            v_new.reconcile := v_new.reconcile_rule ->> 'how';
        WHEN 'absent' THEN v_new.absent := once.policy_text(v_name, v_value, ARRAY['escalate', 'failed', 'resend']);
        WHEN 'absent_after' THEN v_new.absent_after := once.policy_interval(v_name, v_value, '10 milliseconds', '1 year');
        WHEN 'on_settled' THEN v_new.on_settled := once.policy_text(v_name, v_value, NULL);
        WHEN 'attempts_max' THEN v_new.attempts_max := once.policy_number(v_name, v_value, 1, 1000000);
        WHEN 'backoff' THEN v_new.backoff := once.policy_interval(v_name, v_value, '0', '1 day');
        WHEN 'backoff_max' THEN v_new.backoff_max := once.policy_interval(v_name, v_value, '0', '7 days');
        WHEN 'reconcile_after' THEN v_new.reconcile_after := once.policy_interval(v_name, v_value, '0', '7 days');
        WHEN 'escalate_after' THEN v_new.escalate_after := once.policy_interval(v_name, v_value, '0', '1 year');
        WHEN 'rate_per_second' THEN v_new.rate_per_second := once.policy_number(v_name, v_value, 1, 1000000);
        WHEN 'breaker' THEN
            IF jsonb_typeof(v_value) <> 'object' OR v_value - ARRAY['failures', 'open_for'] <> '{}' THEN
                RAISE EXCEPTION 'policy breaker is an object of failures and open_for' USING ERRCODE = 'P4020';
            END IF;
            v_new.breaker_failures := once.policy_number('failures',
                coalesce(v_value -> 'failures', to_jsonb(v_new.breaker_failures)), 1, 1000000);
            v_new.breaker_open_for := once.policy_interval('open_for',
                coalesce(v_value -> 'open_for', to_jsonb(v_new.breaker_open_for::text)), '10 milliseconds', '1 day');
        WHEN 'retention' THEN
            v_new.retention := CASE v_value #>> '{}' WHEN 'permanent' THEN NULL
                ELSE once.policy_interval(v_name, v_value, '1 second', '100 years') END;
        ELSE
            RAISE EXCEPTION 'unknown policy key %', quote_literal(left(v_name, 40))
                USING ERRCODE = 'P4020', HINT = 'docs/reference/sql.md lists the policy keys of providers.';
        END CASE;
    END LOOP;
    PERFORM once.check_provider(v_new);
    SELECT * INTO v_old FROM once.provider WHERE provider = p_provider;
    IF FOUND AND (to_jsonb(v_old) - 'updated_at') = (to_jsonb(v_new) - 'updated_at') THEN
        RETURN;
    END IF;
    -- Updated, never replaced: its state hangs on it.
    INSERT INTO once.provider SELECT v_new.* ON CONFLICT (provider) DO UPDATE SET
        base_url = excluded.base_url, key_header = excluded.key_header, header_env = excluded.header_env,
        timeout = excluded.timeout, grace = excluded.grace, resend = excluded.resend, accepted = excluded.accepted,
        server_error = excluded.server_error, verify_failed = excluded.verify_failed, reference = excluded.reference,
        reconcile = excluded.reconcile, reconcile_rule = excluded.reconcile_rule, absent = excluded.absent,
        absent_after = excluded.absent_after, on_settled = excluded.on_settled, attempts_max = excluded.attempts_max,
        backoff = excluded.backoff, backoff_max = excluded.backoff_max, reconcile_after = excluded.reconcile_after,
        escalate_after = excluded.escalate_after, rate_per_second = excluded.rate_per_second,
        breaker_failures = excluded.breaker_failures, breaker_open_for = excluded.breaker_open_for,
        retention = excluded.retention, updated_at = excluded.updated_at;
    INSERT INTO once.provider_state (provider, tokens, refilled_at)
        VALUES (p_provider, coalesce(v_new.rate_per_second, 1), once.clock()) ON CONFLICT DO NOTHING;
    INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
        VALUES (session_user, 'define_provider', '', p_provider, '', p_policy::text);
END $$;
