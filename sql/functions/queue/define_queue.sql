-- Declares a queue's rules. What is not named has its default; calling it again replaces the rules, and calling it with
-- the same ones writes nothing, so services may call it at every start.
CREATE OR REPLACE FUNCTION once.define_queue(p_queue text, p_policy jsonb DEFAULT '{}')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id int;
    v_old once.queue;
    v_new once.queue;
    v_name text;
    v_value jsonb;
BEGIN
    PERFORM once.check_queue('', p_queue);
    IF p_policy IS NULL OR jsonb_typeof(p_policy) <> 'object' THEN
        RAISE EXCEPTION 'a policy is a JSON object' USING ERRCODE = 'P4020';
    END IF;
    SELECT * INTO STRICT v_new FROM once.queue WHERE queue = '';
    FOR v_name, v_value IN SELECT * FROM jsonb_each(p_policy) LOOP
        CASE v_name
        WHEN 'attempts_max' THEN v_new.attempts_max := once.policy_number(v_name, v_value, 1, 1000000);
        WHEN 'backoff' THEN v_new.backoff := once.policy_interval(v_name, v_value, '0', '1 day');
        WHEN 'backoff_max' THEN v_new.backoff_max := once.policy_interval(v_name, v_value, '0', '7 days');
        WHEN 'lease' THEN v_new.lease := once.policy_interval(v_name, v_value, '10 milliseconds', '1 day');
        WHEN 'running_max' THEN
            v_new.running_max := CASE v_value #>> '{}' WHEN 'none' THEN NULL
                ELSE once.policy_number(v_name, v_value, 1, 1000000) END;
        WHEN 'key_running_max' THEN v_new.key_running_max := once.policy_number(v_name, v_value, 1, 1000);
        WHEN 'unique' THEN v_new.unique_scope := once.policy_text(v_name, v_value, ARRAY['waiting', 'alive', 'window']);
        WHEN 'unique_window' THEN v_new.unique_window := once.policy_interval(v_name, v_value, '1 millisecond', '100 years');
        WHEN 'keep' THEN
            v_new.keep := CASE v_value #>> '{}' WHEN 'none' THEN NULL
                ELSE once.policy_interval(v_name, v_value, '1 second', '100 years') END;
        ELSE
            RAISE EXCEPTION 'unknown policy key %', quote_literal(left(v_name, 40))
                USING ERRCODE = 'P4020', HINT = 'docs/reference/sql.md lists the policy keys of queues.';
        END CASE;
    END LOOP;
    v_id := once.queue_id(p_queue);
    SELECT * INTO v_old FROM once.queue WHERE id = v_id;
    v_new.id := v_id;
    v_new.queue := p_queue;
    v_new.updated_at := v_old.updated_at;
    IF v_old IS NOT DISTINCT FROM v_new THEN
        RETURN;
    END IF;
    UPDATE once.queue q SET attempts_max = v_new.attempts_max, backoff = v_new.backoff, backoff_max = v_new.backoff_max,
        lease = v_new.lease, running_max = v_new.running_max, key_running_max = v_new.key_running_max,
        unique_scope = v_new.unique_scope, unique_window = v_new.unique_window, keep = v_new.keep, updated_at = once.clock()
    WHERE q.id = v_id;
    INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
        VALUES (session_user, 'define_queue', '', p_queue, '', p_policy::text);
END $$;
