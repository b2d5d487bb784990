-- One value of canonical_json and all below it. A statement a container, not a call a value: strings,
-- booleans and null are printed in place (jsonb escapes exactly as JCS does), and string_agg builds the text
-- without copying what it has for every element. jsonb has dropped duplicate keys already (the last one wins).
-- STABLE, not IMMUTABLE: canonical_number relies on a setting that canonical_json pins.
CREATE OR REPLACE FUNCTION once.canonical_node(p_value jsonb) RETURNS text
LANGUAGE plpgsql STABLE STRICT AS $$
BEGIN
    CASE jsonb_typeof(p_value)
    WHEN 'object' THEN
        RETURN (
            SELECT '{' || coalesce(string_agg(
                to_json(e.key)::text || ':' || CASE jsonb_typeof(e.value)
                    WHEN 'number' THEN once.canonical_number(e.value::numeric)
                    WHEN 'object' THEN once.canonical_node(e.value)
                    WHEN 'array' THEN once.canonical_node(e.value)
                    ELSE e.value::text END,
                ',' ORDER BY CASE WHEN octet_length(e.key) = length(e.key) THEN e.key
                             ELSE once.utf16_sort_key(e.key) END COLLATE "C"), '') || '}'
            FROM jsonb_each(p_value) e);
    WHEN 'array' THEN
        RETURN (
            SELECT '[' || coalesce(string_agg(
                CASE jsonb_typeof(e.value)
                    WHEN 'number' THEN once.canonical_number(e.value::numeric)
                    WHEN 'object' THEN once.canonical_node(e.value)
                    WHEN 'array' THEN once.canonical_node(e.value)
                    ELSE e.value::text END,
                ',' ORDER BY e.place), '') || ']'
            FROM jsonb_array_elements(p_value) WITH ORDINALITY e (value, place));
    WHEN 'number' THEN
        RETURN once.canonical_number(p_value::numeric);
    ELSE
        RETURN p_value::text;
    END CASE;
END $$;
