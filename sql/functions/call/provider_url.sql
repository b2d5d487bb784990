-- A provider's base, checked: scheme, host, and a path that calls stay under. Without its last slash.
CREATE OR REPLACE FUNCTION once.provider_url(p_value jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_url text := rtrim(p_value #>> '{}', '/');
BEGIN
    IF jsonb_typeof(p_value) <> 'string' OR length(v_url) > 500 OR v_url !~ '^https?://[A-Za-z0-9._:\[\]-]+(/[A-Za-z0-9._~!$&''()*+,;=:@-]+)*$'
       OR NOT once.is_inside(coalesce(nullif(substring(v_url FROM '^https?://[^/]+(/.*)$'), ''), '/')) THEN
        RAISE EXCEPTION 'policy base_url is not an address as https://api.example.com/v1' USING ERRCODE = 'P4020',
            HINT = 'No login, no query, no dots that climb. Secrets are headers: see header_env.';
    END IF;
    RETURN v_url;
END $$;
