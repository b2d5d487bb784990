-- The rules that a scope was given, as a JSON object; NULL where nobody defined it. For whoever defined it, to see
-- whether they are still its own: define_scope replaces them, whoever calls it.
CREATE OR REPLACE FUNCTION once.scope_rules(p_scope text, p_tenant text DEFAULT '')
RETURNS jsonb LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT to_jsonb(s) - 'scope' - 'tenant' - 'updated_at' FROM once.scope s
            WHERE s.scope = p_scope AND s.tenant = p_tenant AND s.scope <> '');
END $$;
