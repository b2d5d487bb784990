-- What a JSON body says at a path as charge.id or data.0.id; NULL where it says nothing, or is no JSON.
CREATE OR REPLACE FUNCTION once.json_field(p_body bytea, p_path text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_path IS NULL OR p_body IS NULL OR octet_length(p_body) > 1048576 THEN
        RETURN NULL;
    END IF;
    RETURN convert_from(p_body, 'UTF8')::jsonb #>> string_to_array(p_path, '.');
EXCEPTION WHEN data_exception OR character_not_in_repertoire OR untranslatable_character OR program_limit_exceeded
    OR statement_too_complex OR invalid_text_representation THEN
    RETURN NULL;
END $$;
