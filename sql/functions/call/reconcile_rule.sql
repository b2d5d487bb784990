-- How a provider is asked what became of a call, checked: "none", "worker", {"how": "sql", "function": …} or
-- {"how": "http", "path": …} with how its answer is read.
CREATE OR REPLACE FUNCTION once.reconcile_rule(p_value jsonb) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_wrong text;
    v_how text := coalesce(p_value ->> 'how', p_value #>> '{}');
    v_path text := p_value ->> 'path';
BEGIN
    IF jsonb_typeof(p_value) = 'string' AND v_how IN ('none', 'worker') THEN
        RETURN jsonb_build_object('how', v_how);
    END IF;
    v_wrong := CASE
        WHEN jsonb_typeof(p_value) <> 'object' THEN 'it is none, worker, or an object with how'
        WHEN v_how IN ('none', 'worker') AND p_value - 'how' = '{}' THEN NULL
        WHEN v_how = 'sql' AND p_value - ARRAY['how', 'function'] = '{}' AND jsonb_typeof(p_value -> 'function') = 'string' THEN NULL
        WHEN v_how = 'sql' THEN 'sql has a function, and nothing else'
        WHEN v_how IS DISTINCT FROM 'http' THEN 'how is none, http, sql or worker'
        WHEN p_value - ARRAY['how', 'path', 'field', 'confirmed', 'failed', 'absent', 'missing', 'absent_status', 'reference'] <> '{}'
            THEN 'http knows path, field, confirmed, failed, absent, missing, absent_status and reference'
        WHEN jsonb_typeof(p_value -> 'path') IS DISTINCT FROM 'string' OR v_path !~ '\{(key|reference)\}'
             OR NOT once.is_inside(replace(replace(v_path, '{key}', 'k'), '{reference}', 'r'))
            THEN 'path has {key} or {reference}, and stays under base_url'
        WHEN EXISTS (SELECT FROM unnest(ARRAY['field', 'reference']) n WHERE p_value ? n
                     AND (jsonb_typeof(p_value -> n) <> 'string' OR p_value ->> n !~ '^[A-Za-z0-9_.-]{1,255}$'))
            THEN 'field and reference are paths as charge.status'
        WHEN EXISTS (SELECT FROM unnest(ARRAY['confirmed', 'failed', 'absent', 'absent_status']) n WHERE p_value ? n
                     AND jsonb_typeof(p_value -> n) <> 'array')
            THEN 'confirmed, failed, absent and absent_status are lists'
        WHEN (p_value ? 'field') <> (p_value ? 'confirmed') OR (NOT p_value ? 'field' AND p_value ?| ARRAY['failed', 'absent', 'missing'])
            THEN 'field needs the values that mean confirmed, and values need a field'
        WHEN p_value ? 'missing' AND (p_value ->> 'missing') NOT IN ('absent', 'pending') THEN 'missing is absent or pending'
        END;
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION 'policy reconcile cannot be used: %', v_wrong USING ERRCODE = 'P4020', HINT = 'See docs/guides/calls.md.';
    END IF;
    RETURN p_value;
END $$;
