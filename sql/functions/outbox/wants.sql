-- Whether a sink wants such a message: one of its topics, one of its types, one of its tenants; none named: all.
CREATE OR REPLACE FUNCTION once.wants(p_sink once.sink, p_topic text, p_type text, p_tenant text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT ((p_sink).topics = '{}' OR p_topic LIKE ANY ((p_sink).topics))
       AND ((p_sink).types = '{}' OR p_type LIKE ANY ((p_sink).types))
       AND ((p_sink).tenants = '{}' OR p_tenant = ANY ((p_sink).tenants)) $$;
